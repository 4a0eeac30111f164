// The measuring loop of churn.py: among many live blocks, one drawn at random is freed
// and another size asked for in its place.
#include "loops.h"

#include <cmath>
#include <cstdint>
#include <random>

namespace {

struct Churn {
  size_t live;
  double least, most; // log2 of the sizes
  double power;       // of the exponent's draw: 1 log-uniform, more prefers small sizes
  long count;         // replacements that are timed at once
  int rounds;         // of them, after one that is not timed
};

struct Found {
  std::vector<double> ns; // a replacement, of each round
  double live_bytes = 0, reserved_bytes = 0;
};

// The sequence is fixed, so every allocator gets the same one.
class Sizes {
public:
  explicit Sizes(const Churn &c) {
    std::mt19937_64 random(2024);
    for (auto &size : sizes_) {
      const double u = double(random() >> 11) * 0x1p-53;
      size = size_t(std::exp2(c.least + (c.most - c.least) * std::pow(u, c.power)));
    }
  }
  size_t next() { return sizes_[at_++ % sizes_.size()]; }

private:
  std::vector<size_t> sizes_ = std::vector<size_t>(65521);
  size_t at_ = 0;
};

Found churn(const Churn &c) {
  struct Block {
    void *ptr;
    size_t size;
  };
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
      const auto begin = Clock::now();
      for (const uint32_t victim : victims) {
        Block &block = blocks[victim];
        allocator::raw_delete(block.ptr);
        block.ptr = nullptr;
        block.size = sizes.next();
        block.ptr = allocator::raw_alloc(block.size);
      }
      const double took = nanoseconds_since(begin);
      if (round) // in the first one memory comes from the device
        found.ns.push_back(took / double(c.count));
    }
    const auto stats = allocator::getDeviceStats(0);
    found.reserved_bytes = double(stats.reserved_bytes[0].current);
  } catch (...) {
    for (auto &block : blocks)
      if (block.ptr)
        allocator::raw_delete(block.ptr);
    throw;
  }
  for (auto &block : blocks) {
    found.live_bytes += double(block.size);
    allocator::raw_delete(block.ptr);
  }
  return found;
}

PyObject *py_churn(PyObject *, PyObject *args) {
  Py_ssize_t live;
  Churn c;
  if (!PyArg_ParseTuple(args, "ndddli", &live, &c.least, &c.most, &c.power, &c.count, &c.rounds))
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
     "churn(live, least, most, power, count, rounds) -> ([ns a replacement], live bytes, "
     "reserved bytes); sizes are 2^(least + (most - least) * u^power), u from 0 to 1"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "churn_loops", nullptr, -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_churn_loops() { return PyModule_Create(&module); }
