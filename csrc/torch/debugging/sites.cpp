#include "sites.h"

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_function.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "../base/gil.h"
#include "../base/python_objects.h"

namespace esper::sites
{

namespace
{

constexpr size_t user_frames = 4; // kept of a place
constexpr int depth = 100;        // looked at
constexpr uint32_t in_backward = 1u << 31;

// A position in a code object. The line is found when somebody asks.
struct Frame {
  PyCodeObject *code; // kept alive
  int position;

  bool operator==(const Frame &other) const
  {
    return code == other.code && position == other.position;
  }
};
using Frames = c10::SmallVector<Frame, user_frames>;

struct Book {
  std::mutex mutex;
  std::vector<Frames> places{1}; // number 0 is unknown
  std::unordered_map<size_t, c10::SmallVector<uint32_t, 1>> by_hash;
  std::unordered_map<const PyCodeObject *, bool> is_users; // of code objects that are kept alive
  std::vector<std::string> foreign;
};

Book &book()
{
  static auto *instance = new Book();
  return *instance;
}

int position_of(PyFrameObject *frame)
{
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

int line_of(const Frame &frame)
{
#if PY_VERSION_HEX >= 0x030B0000
  return PyCode_Addr2Line(frame.code, frame.position);
#else
  return frame.position;
#endif
}

bool is_users_file(const Book &b, std::string_view file)
{
  if (!file.empty() && file[0] == '<' && file != "<stdin>" && file != "<string>") {
    return false;
  }
  for (const std::string &folder : b.foreign) {
    if (file.substr(0, folder.size()) == folder) {
      return false;
    }
  }
  return true;
}

bool is_users(Book &b, PyCodeObject *code)
{
  {
    std::lock_guard<std::mutex> lock(b.mutex);
    const auto found = b.is_users.find(code);
    if (C10_LIKELY(found != b.is_users.end())) {
      return found->second;
    }
  }
  const char *file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) {
    PyErr_Clear();
    file = "";
  }
  std::lock_guard<std::mutex> lock(b.mutex);
  const auto [known, is_new] = b.is_users.emplace(code, is_users_file(b, file));
  if (is_new) {
    Py_INCREF(code); // so that the address is never another one's
  }
  return known->second;
}

// The user's innermost frames. Without any, the innermost ones. Frames are objects, so asking for
// them may collect garbage, free tensors and come back to here(): no lock may be held.
Frames gather(Book &b)
{
  Frames users;
  Frames others;
  PyFrameObject *frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int i = 0; frame != nullptr && i < depth && users.size() < user_frames; ++i) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    const bool is_one = is_users(b, code);
    if (is_one) {
      users.push_back({code, position_of(frame)});
    } else if (users.empty() && others.size() < user_frames) {
      others.push_back({code, position_of(frame)});
    }
    Py_DECREF(code); // is_users keeps it
    PyFrameObject *back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return users.empty() ? others : users;
}

uint32_t number_of(Book &b, const Frames &frames)
{
  if (frames.empty()) {
    return 0;
  }
  size_t hash = frames.size();
  for (const Frame &frame : frames) {
    hash = c10::hash_combine(hash,
                             c10::get_hash(static_cast<const void *>(frame.code), frame.position));
  }
  auto &numbers = b.by_hash[hash];
  for (const uint32_t number : numbers) {
    if (b.places[number] == frames) {
      return number;
    }
  }
  const auto number = static_cast<uint32_t>(b.places.size());
  b.places.push_back(frames);
  numbers.push_back(number);
  return number;
}

// The last operators that may have made a backward node.
struct Forward {
  std::atomic<uint64_t> node{0};
  std::atomic<uint32_t> site{0};
};
std::array<Forward, 1 << 16> forwards;

uint64_t node_of(uint64_t sequence_number, uint64_t thread)
{
  return (sequence_number << 16) ^ (thread & 0xffff) ^ 1;
}

Forward &forward_of(uint64_t sequence_number)
{
  return forwards[sequence_number % forwards.size()];
}

} // namespace

uint32_t here()
{
  if (esper_py_is_there() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return 0;
  }
  std::optional<pybind11::gil_scoped_acquire> gil;
  if (esper_py_holds_gil() == 0) {
    gil.emplace();
  }
  Book &b = book();
  const Frames frames = gather(b);
  std::lock_guard<std::mutex> lock(b.mutex);
  return number_of(b, frames);
}

uint32_t of_backward()
{
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return 0;
  }
  const Forward &forward = forward_of(node->sequence_nr());
  const uint32_t site = forward.site.load(std::memory_order_relaxed);
  const bool is_its = forward.node.load(std::memory_order_acquire) ==
                      node_of(node->sequence_nr(), node->thread_id());
  return is_its && site != 0 ? site | in_backward : 0;
}

uint32_t now()
{
  const uint32_t site = here();
  return site != 0 ? site : of_backward();
}

// Whether it is of an autograd.Function in Python; all of these have one type. PyTorch does not
// export it.
static bool is_of_python(const torch::autograd::Node &node)
{
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// The Python object of such a node; newer versions of PyTorch have no member for it.
template <class PyNode>
static auto object_of(const PyNode &node, int) -> decltype(node.obj)
{
  return node.obj;
}
template <class PyNode>
static PyObject *object_of(const PyNode &node, long)
{
  return node.pyobj();
}

// The caller is C.
int current_node(uint64_t *hash, char *name, size_t size)
{
  try {
    const auto node = torch::autograd::get_current_node();
    if (node == nullptr) {
      return 0;
    }
    const torch::autograd::Node &it = *node;
    *hash = typeid(it).hash_code();
    if (is_of_python(it)) {
      PyObject *object = object_of(static_cast<const torch::autograd::PyNode &>(it), 0);
      *hash ^= object == nullptr ? 0 : reinterpret_cast<uintptr_t>(Py_TYPE(object));
    }
    if (name != nullptr) {
      std::snprintf(name, size, "autograd (%s)", it.name().c_str());
    }
    return 1;
  } catch (const std::exception &) {
    return 0; // no host memory, or Python raised
  }
}

void note_forward(int64_t sequence_number, uint32_t site)
{
  if (sequence_number < 0 || site == 0) {
    return;
  }
  const auto number = static_cast<uint64_t>(sequence_number);
  Forward &forward = forward_of(number);
  forward.site.store(site & ~in_backward, std::memory_order_relaxed);
  forward.node.store(node_of(number, at::RecordFunction::currentThreadId()),
                     std::memory_order_release);
}

void set_foreign_folders(std::vector<std::string> folders)
{
  Book &b = book();
  std::lock_guard<std::mutex> lock(b.mutex);
  if (b.foreign != folders) {
    b.foreign = std::move(folders);
    b.is_users.clear(); // the references stay: places name these code objects
  }
}

PyObject *describe(uint32_t site)
{
  Book &b = book();
  Frames frames;
  {
    std::lock_guard<std::mutex> lock(b.mutex);
    const uint32_t number = site & ~in_backward;
    if (number < b.places.size()) {
      frames = b.places[number];
    }
  }
  Reference list(PyList_New(0));
  for (size_t i = 0; list && i < frames.size(); ++i) {
    const Frame &frame = frames[i];
    const Reference entry(
        Py_BuildValue("(OiO)", frame.code->co_filename, line_of(frame), frame.code->co_name));
    if (!entry || PyList_Append(list.get(), entry.get()) != 0) {
      return nullptr;
    }
  }
  return list ? Py_BuildValue("(OO)", (site & in_backward) != 0 ? Py_True : Py_False, list.get())
              : nullptr;
}

} // namespace esper::sites
