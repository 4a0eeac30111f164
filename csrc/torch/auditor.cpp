#include "auditor.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "automatic.h"
#include "footprints.h"
#include "gpu_trace.h"
#include "mark_watch.h"
#include "observer.h"
#include "operations.h"
#include "poison.h"
#include "python_objects.h"
#include "sites.h"

namespace esper
{

namespace
{

using c10::cuda::CUDAStream;

const esper_audit_capi *functions = nullptr;

// A view of a graph's output: since which replay it shows it.
struct View {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint64_t born;
};

struct Auditor {
  std::mutex mutex; // guards all that follows; nobody waits for the GIL with it
  audit *engine = nullptr;
  std::vector<std::string> tensors{std::string()}; // descriptions; number 0 is unknown
  std::unordered_map<size_t, uint32_t> tensor_numbers;
  std::unordered_map<const c10::TensorImpl *, View> views;
  std::unordered_set<uintptr_t> gradients; // live blocks that backward allocated
  size_t told = 0;                         // findings that `notify` knows
};

Auditor *the_auditor = new Auditor(); // never destroyed: operators may run until the very end

Auditor &auditor()
{
  return *the_auditor;
}

std::atomic<bool> running{false};
std::atomic<bool> has_graphs{false};
std::atomic<bool> is_poisoning{false};
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE; // with the GIL
std::atomic<PyObject *> notify{nullptr};
std::atomic<bool> notify_is_due{false};

// What a thread is doing.
struct Thread {
  // The functions that run, the innermost last. Null: one without a schema, such as the forward of an
  // autograd.Function.
  c10::SmallVector<const Operation *, 16> running;
  bool site_is_known = false;
  uint32_t site = 0; // of the outermost of those that run no Python between them

  const Operation *innermost() const
  {
    return running.empty() ? nullptr : running.back();
  }
  // Whether what runs now is at the same line as what was asked for last.
  bool keeps_site() const
  {
    return innermost() != nullptr && !innermost()->may_run_python;
  }
};
thread_local Thread thread;

audit_stream name_of(CUDAStream stream)
{
  return {stream.device_index(), reinterpret_cast<uint64_t>(stream.stream())};
}

// Tracers name a stream by its handle. Its device is then the current one.
audit_stream name_of(uintptr_t handle)
{
  return {c10::cuda::current_device(), handle};
}

// ---- sites -------------------------------------------------------------------

uint32_t site_now()
{
  if (thread.keeps_site() && thread.site_is_known) {
    return thread.site;
  }
  uint32_t site = sites::here();
  if (site == 0) {
    site = sites::of_backward();
  }
  thread.site_is_known = true;
  thread.site = site;
  return site;
}

// ---- telling Python ----------------------------------------------------------

int tell_python(void * /*unused*/)
{
  notify_is_due.store(false);
  PyObject *function = notify.load();
  if (function == nullptr) {
    return 0;
  }
  Py_INCREF(function);
  PyObject *result = PyObject_CallNoArgs(function);
  Py_DECREF(function);
  Py_XDECREF(result);
  return result == nullptr ? -1 : 0;
}

// Calls `call(engine)` if an audit is running.
template <class Call>
void with_engine(const Call &call) noexcept
{
  if (!running.load(std::memory_order_acquire)) {
    return;
  }
  Auditor &a = auditor();
  bool is_news = false;
  {
    std::lock_guard<std::mutex> lock(a.mutex);
    if (a.engine == nullptr || !running.load(std::memory_order_relaxed)) {
      return;
    }
    call(a, a.engine);
    const size_t found = functions->finding_count(a.engine);
    is_news = found != a.told;
    a.told = found;
  }
  if (C10_UNLIKELY(is_news && notify.load() != nullptr) && !notify_is_due.exchange(true)) {
    Py_AddPendingCall(tell_python, nullptr);
  }
}

// ---- operators ---------------------------------------------------------------

uint32_t tensor_number(Auditor &a, const c10::TensorImpl &tensor)
{
  const TensorShape shape = shape_of(tensor);
  const size_t hash = shape.hash();
  const auto found = a.tensor_numbers.find(hash);
  if (C10_LIKELY(found != a.tensor_numbers.end())) {
    return found->second;
  }
  const auto number = static_cast<uint32_t>(a.tensors.size());
  a.tensors.push_back(shape.text());
  a.tensor_numbers.emplace(hash, number);
  return number;
}

// One access, with what is found out before the engine's lock is taken.
struct Seen {
  audit_access access;
  const c10::TensorImpl *tensor;
  CUDAStream stream;
};
using AllSeen = c10::SmallVector<Seen, 8>;

void add_seen(AllSeen &all, const Access &access, bool writes)
{
  const c10::StorageImpl *storage = access.tensor.unsafe_storage().unsafeGetStorageImpl();
  Seen seen{{}, &access.tensor, access.stream};
  seen.access.address = reinterpret_cast<uintptr_t>(access.data);
  seen.access.size = storage_size(*storage);
  if (!footprint_of(access.tensor, seen.access.address, seen.access.size, seen.access.bytes)) {
    return; // no element
  }
  seen.access.stream = name_of(access.stream);
  seen.access.writes = writes ? 1 : 0;
  all.push_back(seen);
}

uint64_t born_of(Auditor &a, const c10::TensorImpl *tensor)
{
  if (C10_LIKELY(a.views.empty())) {
    return 0;
  }
  const auto found = a.views.find(tensor);
  return found != a.views.end() && !found->second.tensor.expired() ? found->second.born : 0;
}

void tell_accesses(AllSeen &all, uint32_t operation)
{
  if (all.empty()) {
    return;
  }
  if (C10_UNLIKELY(is_poisoning.load(std::memory_order_relaxed)) && are_uses_noted()) {
    for (const Seen &seen : all) {
      poison::marked(reinterpret_cast<const void *>(seen.access.address), seen.stream);
    }
  }
  const uint32_t site = site_now();
  const bool is_backward = torch::autograd::get_current_node() != nullptr;
  with_engine([&](Auditor &a, audit *engine) {
    for (Seen &seen : all) {
      const audit_access &access = seen.access;
      seen.access.place = {site, operation, tensor_number(a, *seen.tensor)};
      seen.access.born = born_of(a, seen.tensor);
      functions->accessed(engine, &access);
      // Autograd hands gradients from stream to stream, and calls the allocator's recordStream() by
      // itself, which PyTorch's own allocator does not show.
      if (is_backward && a.gradients.count(access.address) != 0) {
        functions->marked(engine, access.address, access.stream, 1, site);
      }
    }
  });
}

void tell_record_stream(const at::RecordFunction &function)
{
  const auto inputs = function.inputs();
  if (inputs.size() < 2 || !inputs[0].isTensor() || !inputs[1].isStream()) {
    return;
  }
  const CUDAStream stream(inputs[1].toStream());
  const uint32_t site = site_now();
  each_access(inputs[0], [&](const Access &access) {
    with_engine([&](Auditor & /*a*/, audit *engine) {
      functions->marked(engine, reinterpret_cast<uintptr_t>(access.data), name_of(stream), 1, site);
    });
  });
}

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction &function)
{
  // A forked child takes no lock here: another thread may have held it.
  const Operation *operation =
      running.load(std::memory_order_relaxed) ? find_operation(function) : nullptr;
  thread.site_is_known = thread.site_is_known && thread.keeps_site();
  thread.running.push_back(operation);
  if (operation == nullptr) {
    return nullptr;
  }
  if (C10_UNLIKELY(operation->is_record_stream)) {
    tell_record_stream(function);
    return nullptr;
  }
  AllSeen all;
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Argument what = operation->argument(i);
    if (what != Argument::none) {
      each_access(inputs[i],
                  [&](const Access &access) { add_seen(all, access, what == Argument::write); });
    }
  }
  tell_accesses(all, operation->number);
  if (!all.empty()) {
    sites::note_forward(function.seqNr(), thread.site);
  }
  return nullptr;
}

// Views of a graph's outputs show what the last replay left there, until the next one.
void note_views(const at::RecordFunction &function)
{
  const Operation *operation = find_operation(function);
  if (operation == nullptr || !operation->makes_views) {
    return;
  }
  const auto note = [](const c10::IValue &output) {
    each_access(output, [](const Access &access) {
      with_engine([&](Auditor &a, audit *engine) {
        const uint64_t born =
            functions->generation(engine, reinterpret_cast<uintptr_t>(access.data));
        if (born == 0) {
          return;
        }
        if (a.views.size() > 4096) {
          for (auto view = a.views.begin(); view != a.views.end();) {
            view = view->second.tensor.expired() ? a.views.erase(view) : std::next(view);
          }
        }
        auto *tensor = const_cast<c10::TensorImpl *>(&access.tensor);
        const auto found = a.views.find(tensor);
        if (found != a.views.end() && !found->second.tensor.expired()) {
          return; // changed in place, or returned as it was
        }
        a.views.erase(tensor);
        a.views.emplace(tensor,
                        View{c10::weak_intrusive_ptr<c10::TensorImpl>(
                                 c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(
                                     tensor)),
                             born});
      });
    });
  };
  for (const c10::IValue &output : function.outputs()) {
    note(output);
  }
}

void operator_ends(const at::RecordFunction &function, at::ObserverContext * /*none*/)
{
  if (has_graphs.load(std::memory_order_relaxed) && running.load(std::memory_order_relaxed)) {
    note_views(function);
  }
  thread.site_is_known = thread.site_is_known && thread.keeps_site();
  if (!thread.running.empty()) {
    thread.running.pop_back();
  }
  thread.site_is_known = thread.site_is_known && thread.keeps_site();
}

void register_callback(bool with_outputs)
{
  if (callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback);
  }
  callback = at::addGlobalCallback(at::RecordFunctionCallback(operator_starts, operator_ends)
                                       .needsInputs(true)
                                       .needsOutputs(with_outputs)
                                       .scopes({at::RecordScope::FUNCTION}));
}

// ---- the tracer --------------------------------------------------------------

void memory_allocated(uintptr_t address)
{
  if (!running.load(std::memory_order_relaxed)) {
    return;
  }
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  const uint32_t site = site_now();
  const Operation *operation = thread.innermost();
  const bool is_gradient = torch::autograd::get_current_node() != nullptr;
  with_engine([&](Auditor &a, audit *engine) {
    functions->allocated(engine, address, 0, &stream, site);
    // An operator's outputs are no arguments, so this is the only sign that it writes them.
    if (operation != nullptr && operation->writes_what_it_allocates) {
      audit_access access{};
      access.address = address;
      access.bytes = {address, UINTPTR_MAX - address, 0, 0};
      access.stream = stream;
      access.writes = 1;
      access.place = {site, operation->number, 0};
      functions->accessed(engine, &access);
    }
    if (is_gradient) {
      a.gradients.insert(address);
    }
  });
}

void memory_freed(uintptr_t address)
{
  if (!running.load(std::memory_order_relaxed)) {
    return;
  }
  const uint32_t site = site_now();
  with_engine([&](Auditor &a, audit *engine) {
    functions->freed(engine, address, site);
    a.gradients.erase(address);
  });
}

template <class Tell>
void tell_order(const Tell &tell)
{
  with_engine([&](Auditor & /*a*/, audit *engine) { tell(engine); });
}

const GpuTraceListener listener = {
    [](uintptr_t event, uintptr_t stream) {
      tell_order([&](audit *engine) { functions->record(engine, event, name_of(stream)); });
    },
    [](uintptr_t event, uintptr_t stream) {
      tell_order([&](audit *engine) { functions->wait(engine, name_of(stream), event); });
    },
    [](uintptr_t event) {
      tell_order([&](audit *engine) { functions->event_destroyed(engine, event); });
    },
    [](uintptr_t event) {
      tell_order([&](audit *engine) { functions->event_synchronized(engine, event); });
    },
    [](uintptr_t stream) {
      tell_order([&](audit *engine) { functions->stream_synchronized(engine, name_of(stream)); });
    },
    [] {
      tell_order([](audit *engine) {
        functions->device_synchronized(engine, c10::cuda::current_device());
      });
    },
    memory_allocated,
    memory_freed};

// ---- marks -------------------------------------------------------------------

const MarkWatcher watcher = {
    [](const void *ptr, CUDAStream stream, bool until_free) {
      poison::marked(ptr, stream);
      const uint32_t site = site_now();
      tell_order([&](audit *engine) {
        functions->marked(engine, reinterpret_cast<uintptr_t>(ptr), name_of(stream),
                          until_free ? 1 : 0, site);
      });
    },
    [](const void *ptr, const RecordedEvent &event) {
      poison::marked_for_unknown(ptr);
      const uint32_t site = site_now();
      tell_order([&](audit *engine) {
        functions->marked_by_event(engine, reinterpret_cast<uintptr_t>(ptr),
                                   reinterpret_cast<uint64_t>(event.handle), site);
      });
    },
    [](const void *ptr) {
      poison::marked_for_unknown(ptr);
      tell_order([&](audit *engine) { functions->held(engine, reinterpret_cast<uintptr_t>(ptr)); });
    }};

// ---- poison ------------------------------------------------------------------

void late_write(const poison::LateWrite &late)
{
  audit_finding f{};
  f.kind = AUDIT_LATE_WRITE;
  f.count = 1;
  f.address = late.address;
  f.size = late.size;
  f.allocated = late.allocated;
  f.home_is_known = 1;
  f.home = {late.device, reinterpret_cast<uint64_t>(late.home)};
  f.earlier.stream = f.home;
  f.earlier.writes = 1;
  f.later = {{late.handed_out, 0, 0}, f.home, 0, 1};
  f.has_later = 1;
  f.freed = late.freed;
  tell_order([&](audit *engine) { functions->report(engine, &f); });
}

// ---- findings for Python -----------------------------------------------------

// Puts a new reference into the dict, and drops it. False with a Python exception.
bool put(PyObject *dict, const char *key, PyObject *value)
{
  const Reference owned(value);
  return owned && PyDict_SetItemString(dict, key, value) == 0;
}

PyObject *none()
{
  Py_RETURN_NONE;
}

PyObject *describe_stream(const audit_stream &stream)
{
  return Py_BuildValue("(iK)", stream.device, static_cast<unsigned long long>(stream.handle));
}

PyObject *describe_point(const audit_point &point, const std::string &tensor)
{
  Reference dict(PyDict_New());
  const std::string name = operation_name(point.place.operation);
  const bool fine = dict && put(dict.get(), "site", sites::describe(point.place.site)) &&
                    put(dict.get(), "operator", PyUnicode_FromString(name.c_str())) &&
                    put(dict.get(), "tensor", PyUnicode_FromString(tensor.c_str())) &&
                    put(dict.get(), "stream", describe_stream(point.stream)) &&
                    put(dict.get(), "writes", PyBool_FromLong(point.writes)) &&
                    put(dict.get(), "is_allocation", PyBool_FromLong(point.is_allocation));
  return fine ? Py_NewRef(dict.get()) : nullptr;
}

// A finding, with what the auditor's tables say of it.
struct Found {
  audit_finding finding;
  std::string earlier, later; // tensors
};

PyObject *describe_finding(const Found &found)
{
  const audit_finding &f = found.finding;
  static const char *const kinds[AUDIT_KINDS] = {"freed-in-use", "marked-early", "read-early",
                                                 "write-early",  "stale-output", "late-write"};
  Reference dict(PyDict_New());
  const bool fine =
      dict && put(dict.get(), "kind", PyUnicode_FromString(kinds[f.kind])) &&
      put(dict.get(), "count", PyLong_FromUnsignedLongLong(f.count)) &&
      put(dict.get(), "address", PyLong_FromUnsignedLongLong(f.address)) &&
      put(dict.get(), "size", PyLong_FromSize_t(f.size)) &&
      put(dict.get(), "allocated", sites::describe(f.allocated)) &&
      put(dict.get(), "home", f.home_is_known ? describe_stream(f.home) : none()) &&
      put(dict.get(), "earlier", describe_point(f.earlier, found.earlier)) &&
      put(dict.get(), "later", f.has_later ? describe_point(f.later, found.later) : none()) &&
      put(dict.get(), "freed", sites::describe(f.freed)) &&
      put(dict.get(), "marked", sites::describe(f.marked));
  return fine ? Py_NewRef(dict.get()) : nullptr;
}

uint64_t number_of(PyObject *object)
{
  const unsigned long long number = PyLong_AsUnsignedLongLong(object);
  if (PyErr_Occurred() != nullptr) {
    throw python_error();
  }
  return number;
}

// Tensors in tuples and lists, to any depth.
void see_object(AllSeen &all, PyObject *value)
{
  if (THPVariable_Check(value)) {
    each_access(*THPVariable_Unpack(value).unsafeGetTensorImpl(),
                [&](const Access &access) { add_seen(all, access, false); });
    return;
  }
  if (!PyTuple_Check(value) && !PyList_Check(value)) {
    return;
  }
  if (Py_EnterRecursiveCall(" while looking for tensors") != 0) {
    throw python_error();
  }
  struct Leave {
    ~Leave()
    {
      Py_LeaveRecursiveCall();
    }
  } leave;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
    see_object(all, PySequence_Fast_GET_ITEM(value, i));
  }
}

// A forked child is not audited. Threads that it does not have may have held locks.
void end_in_child()
{
  running.store(false);
  is_poisoning.store(false);
  poison::detail::is_on.store(false);
  the_auditor = new Auditor();
}

} // namespace

void set_audit_capi(const esper_audit_capi *table)
{
  functions = table;
}

PyObject *audit_start(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3 && PyList_Check(args[0]),
                   "audit_start() takes a list, a function and a flag");
  TORCH_CHECK(!running.load(), "an audit is running in this process already: end it first");
  std::vector<std::string> folders;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    const char *folder = PyUnicode_AsUTF8(PyList_GET_ITEM(args[0], i));
    if (folder == nullptr) {
      throw python_error();
    }
    folders.emplace_back(folder);
  }
  static const int in_child = pthread_atfork(nullptr, nullptr, end_in_child);
  TORCH_CHECK(in_child == 0, "no host memory for an audit");
  audit *engine = functions->create();
  TORCH_CHECK(engine != nullptr, "no host memory for an audit");
  sites::set_foreign_folders(std::move(folders));
  {
    Auditor &a = auditor();
    std::lock_guard<std::mutex> lock(a.mutex);
    functions->destroy(a.engine);
    a.engine = engine;
    a.told = 0;
    a.views.clear();
    a.gradients.clear();
  }
  has_graphs.store(false);
  PyObject *function = args[1] == Py_None ? nullptr : Py_NewRef(args[1]);
  Py_XDECREF(notify.exchange(function));
  running.store(true, std::memory_order_release);
  register_callback(false);
  listen_to_gpu_trace(&listener);
  watch_marks_with(&watcher);
  is_poisoning.store(args[2] == Py_True);
  if (args[2] == Py_True) {
    poison::turn_on(late_write);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_stop(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  if (!running.load()) {
    Py_RETURN_NONE;
  }
  is_poisoning.store(false);
  poison::turn_on(nullptr);
  watch_marks_with(nullptr);
  listen_to_gpu_trace(nullptr);
  at::removeCallback(callback);
  callback = at::INVALID_CALLBACK_HANDLE;
  Py_XDECREF(notify.exchange(nullptr));
  Auditor &a = auditor();
  std::lock_guard<std::mutex> lock(a.mutex);
  running.store(false);
  functions->settle(a.engine);
  a.views.clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_findings(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  // Making Python objects may collect garbage and free tensors, so the lock is not held for that.
  Auditor &a = auditor();
  std::vector<Found> all;
  {
    std::lock_guard<std::mutex> lock(a.mutex);
    for (size_t i = 0; a.engine != nullptr && i < functions->finding_count(a.engine); ++i) {
      const audit_finding &f = *functions->finding_at(a.engine, i);
      all.push_back({f, a.tensors[f.earlier.place.tensor], a.tensors[f.later.place.tensor]});
    }
  }
  Reference list(PyList_New(0));
  for (const Found &found : all) {
    const Reference finding(list ? describe_finding(found) : nullptr);
    if (!finding || PyList_Append(list.get(), finding.get()) != 0) {
      throw python_error();
    }
  }
  return Py_XNewRef(list.get());
  END_HANDLE_TH_ERRORS
}

PyObject *audit_state(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  // As above: without the lock.
  bool is_complete = true;
  size_t found = 0;
  size_t bytes = 0;
  Auditor &a = auditor();
  {
    std::lock_guard<std::mutex> lock(a.mutex);
    if (a.engine != nullptr) {
      is_complete = functions->is_complete(a.engine) != 0;
      found = functions->finding_count(a.engine);
      bytes = functions->memory(a.engine);
    }
  }
  return Py_BuildValue("(OOnn)", running.load() ? Py_True : Py_False,
                       is_complete ? Py_True : Py_False, static_cast<Py_ssize_t>(found),
                       static_cast<Py_ssize_t>(bytes));
  END_HANDLE_TH_ERRORS
}

PyObject *audit_known(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "audit_known() takes 4 arguments");
  const uint64_t address = number_of(args[0]);
  const uint64_t size = number_of(args[1]);
  const audit_stream stream = {static_cast<int>(number_of(args[2])), number_of(args[3])};
  tell_order([&](audit *engine) { functions->allocated(engine, address, size, &stream, 0); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_all_done(PyObject * /*module*/, PyObject *devices)
{
  HANDLE_TH_ERRORS
  const uint64_t count = number_of(devices);
  tell_order([&](audit *engine) {
    for (uint64_t device = 0; device < count; ++device) {
      functions->device_synchronized(engine, static_cast<int>(device));
    }
  });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_waited(PyObject * /*module*/, PyObject *event)
{
  HANDLE_TH_ERRORS
  const uint64_t handle = number_of(event);
  tell_order([&](audit *engine) { functions->event_synchronized(engine, handle); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_waited_stream(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "audit_waited_stream() takes 2 arguments");
  const audit_stream stream = {static_cast<int>(number_of(args[0])), number_of(args[1])};
  tell_order([&](audit *engine) { functions->stream_synchronized(engine, stream); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_capture_began(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  if (running.load() && !has_graphs.exchange(true)) {
    register_callback(true);
  }
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  tell_order([&](audit *engine) { functions->capture_began(engine, stream); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_capture_ended(PyObject * /*module*/, PyObject *graph)
{
  HANDLE_TH_ERRORS
  const uint64_t number = number_of(graph);
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  tell_order([&](audit *engine) { functions->capture_ended(engine, stream, number); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_replayed(PyObject * /*module*/, PyObject *graph)
{
  HANDLE_TH_ERRORS
  const uint64_t number = number_of(graph);
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  const audit_place place = {site_now(), operation_number("CUDAGraph.replay"), 0};
  tell_order([&](audit *engine) { functions->replayed(engine, number, stream, place); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_graph_gone(PyObject * /*module*/, PyObject *graph)
{
  HANDLE_TH_ERRORS
  const uint64_t number = number_of(graph);
  tell_order([&](audit *engine) { functions->graph_destroyed(engine, number); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_launch(PyObject * /*module*/, PyObject *values)
{
  HANDLE_TH_ERRORS
  if (running.load(std::memory_order_acquire)) {
    AllSeen all;
    see_object(all, values);
    tell_accesses(all, operation_number("a compiled kernel"));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace esper
