// The measuring loop of churn.py: among many live blocks, one drawn at random is freed
// and another size asked for in its place.
#include "loops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace
{

struct Churn {
  size_t live;
  double least, most; // log2 of the sizes
  double power;       // of the exponent's draw: 1 log-uniform, more prefers small sizes
  long count;         // replacements that are timed at once
  int rounds;         // of them, after one that is not timed
  double longest;     // seconds of a round: then it ends
};

struct Found {
  std::vector<double> ns; // a replacement, of each round
  double live_bytes = 0, reserved_bytes = 0;
};

// The sequence is fixed, so every allocator gets the same one.
class Sizes
{
public:
  explicit Sizes(const Churn &c)
  {
    std::mt19937_64 random(2024);
    for (auto &size : sizes_) {
      const double u = double(random() >> 11) * 0x1p-53;
      size = size_t(std::exp2(c.least + (c.most - c.least) * std::pow(u, c.power)));
    }
  }
  size_t next()
  {
    return sizes_[at_++ % sizes_.size()];
  }

private:
  std::vector<size_t> sizes_ = std::vector<size_t>(65521);
  size_t at_ = 0;
};

struct Block {
  void *ptr;
  size_t size;
};

// What PyTorch says is reserved; nan where the allocator has no statistics.
double reserved_bytes()
{
  try {
    return double(allocator::getDeviceStats(0).reserved_bytes[0].current);
  } catch (const std::exception &) {
    return std::numeric_limits<double>::quiet_NaN();
  }
}

// The highest address first: a sorted list of what is free is searched from the front.
void free_all(std::vector<Block> &blocks)
{
  std::sort(blocks.begin(), blocks.end(),
            [](const Block &a, const Block &b) { return a.ptr > b.ptr; });
  for (auto &block : blocks)
    if (block.ptr)
      allocator::raw_delete(block.ptr);
}

// Replaces the victims: ns of one replacement.
double replace(std::vector<Block> &blocks, const std::vector<uint32_t> &victims, Sizes &sizes,
               double longest)
{
  constexpr size_t LOOK = 1024; // at the clock, every so often
  size_t made = 0;
  const auto begin = Clock::now();
  for (const uint32_t victim : victims) {
    Block &block = blocks[victim];
    allocator::raw_delete(block.ptr);
    block.ptr = nullptr;
    block.size = sizes.next();
    block.ptr = allocator::raw_alloc(block.size);
    if (++made % LOOK == 0 && nanoseconds_since(begin) > longest * 1e9)
      break;
  }
  return nanoseconds_since(begin) / double(made);
}

Found churn(const Churn &c)
{
  Found found;
  Sizes sizes(c);
  std::mt19937_64 random(7);
  std::vector<uint32_t> victims(size_t(c.count));
  std::vector<Block> blocks(c.live);
  try {
    for (auto &block : blocks) {
      block.size = sizes.next();
      block.ptr = allocator::raw_alloc(block.size);
    }
    for (int round = 0; round <= c.rounds; round++) {
      for (auto &victim : victims)
        victim = uint32_t(random() % c.live);
      const double ns = replace(blocks, victims, sizes, c.longest);
      if (round) // in the first one memory comes from the device
        found.ns.push_back(ns);
    }
    found.reserved_bytes = reserved_bytes();
  } catch (...) {
    free_all(blocks);
    throw;
  }
  for (const auto &block : blocks)
    found.live_bytes += double(block.size);
  free_all(blocks);
  return found;
}

PyObject *py_churn(PyObject *, PyObject *args)
{
  Py_ssize_t live;
  Churn c;
  if (!PyArg_ParseTuple(args, "ndddlid", &live, &c.least, &c.most, &c.power, &c.count, &c.rounds,
                        &c.longest))
    return nullptr;
  c.live = size_t(live);
  Found found;
  if (!without_gil([&] { found = churn(c); }))
    return nullptr;
  PyObject *ns = list_of(found.ns, PyFloat_FromDouble);
  return ns ? Py_BuildValue("Ndd", ns, found.live_bytes, found.reserved_bytes) : nullptr;
}

PyMethodDef methods[] = {
    {"churn", py_churn, METH_VARARGS,
     "churn(live, least, most, power, count, rounds, longest) -> ([ns a replacement], live "
     "bytes, reserved bytes or nan); longest: seconds of a round; sizes are 2^(least + (most - "
     "least) * u^power), u from 0 to 1"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "churn_loops", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_churn_loops()
{
  return PyModule_Create(&module);
}
