// What _record_memory_history() asked for, and who else watches: the trace with
// the places in the program that it came from.
//
// The core tells of every action under its device's lock, where Python must not
// be asked. So a call gathers its frames before it goes to the core (CallContext)
// and the watcher takes them from there.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../esper_alloc.h"

namespace esper
{

using c10::GatheredContext;
using c10::CachingDeviceAllocator::AllocatorTraceTracker;
using c10::CachingDeviceAllocator::AnnotationEntry;
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::RecordContext;
using c10::CachingDeviceAllocator::TraceEntry;
using Context = std::shared_ptr<GatheredContext>;

namespace detail
{
extern std::atomic<RecordContext> gathered_from; // NEVER: no frames are wanted
} // namespace detail

// While it lives, what the core does in this thread was asked for here.
// Gathering frames may take the GIL: no lock is held.
class CallContext
{
public:
  explicit CallContext(RecordContext level)
  {
    const RecordContext from = detail::gathered_from.load(std::memory_order_relaxed);
    if (C10_UNLIKELY(from >= level)) {
      gather();
    }
  }
  ~CallContext()
  {
    if (C10_UNLIKELY(gathered_)) {
      leave();
    }
  }
  CallContext(const CallContext &) = delete;
  CallContext &operator=(const CallContext &) = delete;

private:
  void gather();
  void leave();

  Context outer_; // of a call that is going on: a callback of it calls us
  bool gathered_ = false;
};

// What the entries' times count.
time_t microseconds_since_1970();

// The last entries of a device, oldest first, without those that were to be
// left out.
std::vector<TraceEntry> copy_trace(int device);

// Notes that a snapshot of the device was taken.
void trace_snapshot(int device, size_t active, c10::MempoolId_t pool);

// Where live or pending memory was allocated, and where its segment was
// obtained; null where nobody recorded it.
Context context_of_block(int device, uintptr_t address);
Context context_of_segment(int device, uintptr_t address);

// record_function scopes seen while recording, oldest first.
std::vector<AnnotationEntry> copy_annotations();

} // namespace esper
