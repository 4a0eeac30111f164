// The history that _record_memory_history() records: the trace, with the stack frames of the
// program for each action.
//
// The core reports every action under its device's lock, where Python must not be called. So a call
// gathers its frames before it enters the core (CallContext), and the watcher takes them from
// there.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../../esper_alloc.h"
#include "../base/watchers.h"

namespace esper
{

using c10::GatheredContext;
using c10::CachingDeviceAllocator::AnnotationEntry;
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::RecordContext;
using c10::CachingDeviceAllocator::TraceEntry;
using Context = std::shared_ptr<GatheredContext>;

// While an instance lives, actions of the core in this thread belong to its call. Gathering frames
// may take the GIL, so no lock is held.
class CallContext
{
public:
  explicit CallContext(RecordContext level)
  {
    if (is_watched_by(Watcher::FRAMES)) {
      gather(level);
    }
  }
  ~CallContext()
  {
    if (C10_UNLIKELY(outer_ != nullptr)) {
      leave();
    }
  }
  CallContext(const CallContext &) = delete;
  CallContext &operator=(const CallContext &) = delete;

private:
  void gather(RecordContext level);
  void leave();

  // That of the outer call, if a callback made this one. Null: this one gathered nothing.
  std::unique_ptr<Context> outer_;
};

// The clock of the entries' times.
time_t microseconds_since_1970();

// The last entries of a device, oldest first, without skipped actions.
std::vector<TraceEntry> copy_trace(int device);

// Adds an entry for a snapshot of the device.
void trace_snapshot(int device, size_t active, c10::MempoolId_t pool);

// The frames that allocated live or pending memory, and those that obtained its segment; null if
// they were not recorded.
Context context_of_block(int device, uintptr_t address);
Context context_of_segment(int device, uintptr_t address);

// The record_function scopes seen while recording, oldest first.
std::vector<AnnotationEntry> copy_annotations();

} // namespace esper
