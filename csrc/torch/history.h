// What _record_memory_history() asked for, beyond the core's trace.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

namespace esper {

using c10::CachingDeviceAllocator::AnnotationEntry;
using c10::CachingDeviceAllocator::TraceEntry;

// Whether the last recordHistory() asked to leave such entries out.
bool is_skipped(TraceEntry::Action action);

// What the entries' times count.
time_t microseconds_since_1970();

// record_function scopes seen while recording, oldest first.
std::vector<AnnotationEntry> copy_annotations();

} // namespace esper
