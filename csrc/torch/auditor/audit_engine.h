// The process's audit: its happens-before engine (csrc/audit/audit.h) with what else the auditor
// knows, and the lock of both.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../../python/audit_capi.h"
#include "footprints.h"

namespace esper::auditing
{

extern const esper_audit_capi *functions;
extern std::atomic<bool> running;

// A view of a graph's output: for which replay it was handed out, and what it is like.
struct View {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint64_t born, like;
};

struct Auditor {
  std::mutex mutex; // guards all that follows; nobody waits for the GIL with it
  audit *engine = nullptr;
  ShapeNumbers shapes;
  std::vector<std::pair<std::string, std::string>> found_tensors; // earlier and later, by finding
  std::unordered_map<const c10::TensorImpl *, View> views;
  std::unordered_set<uintptr_t> gradients; // live blocks that backward allocated
  size_t told = 0;                         // findings that `notify` knows
};

Auditor &auditor();

// Keeps what the tensors of new findings look like, before that is forgotten. Under the lock.
void keep_tensors(Auditor &a);

// A forked child is not audited. Threads that it does not have may have held locks.
void end_in_child();

// `function` (null: none) is called in the main thread soon after something new was found. Needs
// the GIL.
void set_notify(PyObject *function);

namespace detail
{
void tell_python_soon();
}

// Calls `call(auditor, engine)` if an audit is running.
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
    if (C10_UNLIKELY(is_news)) {
      keep_tensors(a);
    }
  }
  if (C10_UNLIKELY(is_news)) {
    detail::tell_python_soon();
  }
}

// The same for calls that need the engine only.
template <class Tell>
void tell_order(const Tell &tell)
{
  with_engine([&](Auditor & /*a*/, audit *engine) { tell(engine); });
}

inline audit_stream name_of(c10::cuda::CUDAStream stream)
{
  return {stream.device_index(), reinterpret_cast<uint64_t>(stream.stream())};
}

// Tracers name a stream by its handle. Its device is then the current one.
audit_stream name_of(uintptr_t handle);

} // namespace esper::auditing
