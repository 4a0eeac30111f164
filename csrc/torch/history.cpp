// torch.cuda.memory._record_memory_history(). The trace itself is the core's.
#include "history.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <set>

#include "allocator.h"
#include "core_api.h"

namespace esper {
namespace {

struct History {
  std::mutex mutex;
  std::set<TraceEntry::Action> skipped;
  std::deque<AnnotationEntry> annotations;
  size_t max_annotations = 0;
};

History& history() {
  static auto* instance = new History();
  return *instance;
}

std::set<TraceEntry::Action> parse_actions(
    const std::vector<std::string>& names) {
  std::set<TraceEntry::Action> actions;
  for (const auto& name : names) {
    actions.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
  }
  return actions;
}

} // namespace

time_t microseconds_since_1970() {
  using namespace std::chrono;
  return static_cast<time_t>(
      duration_cast<microseconds>(system_clock::now().time_since_epoch())
          .count());
}

bool is_skipped(TraceEntry::Action action) {
  std::lock_guard<std::mutex> lock(history().mutex);
  return history().skipped.count(action) != 0;
}

std::vector<AnnotationEntry> copy_annotations() {
  std::lock_guard<std::mutex> lock(history().mutex);
  return {history().annotations.begin(), history().annotations.end()};
}

bool Allocator::isHistoryEnabled() {
  esper_core* made = core_if_made();
  return made != nullptr && capi().trace_is_on(made) != 0;
}

void Allocator::recordHistory(
    bool enabled,
    native::CreateContextFn /*context_recorder*/,
    size_t max_entries,
    native::RecordContext when,
    bool clear_history,
    const std::vector<std::string>& skip_actions) {
  auto skipped = parse_actions(skip_actions);
  esper_core* made = core();
  if (enabled && when != native::RecordContext::NEVER) {
    TORCH_WARN_ONCE(
        "esper_alloc records memory history without stack frames; pass "
        "context=None to _record_memory_history() to say that this is meant.");
  }
  // "state" arrives as one entry: what is live stands in the snapshot's
  // segments, and the trace is not wanted.
  const size_t entries = enabled ? std::max<size_t>(max_entries, 1) : 0;
  check(
      capi().trace_start(made, entries), "recording memory history");
  if (clear_history) {
    capi().trace_clear(made);
  }
  std::lock_guard<std::mutex> lock(history().mutex);
  history().skipped = std::move(skipped);
  history().max_annotations = entries;
  if (!enabled || clear_history) {
    history().annotations.clear();
  }
}

void Allocator::recordAnnotation(
    const std::vector<std::pair<std::string, std::string>>& annotation) {
  if (!isHistoryEnabled()) {
    return;
  }
  AnnotationEntry entry(
      c10::cuda::current_device(), c10::approx_time_t{});
  entry.time_.t_ = microseconds_since_1970();
  for (const auto& [key, value] : annotation) {
    entry.recordUserMetadata(key, value);
  }
  std::lock_guard<std::mutex> lock(history().mutex);
  auto& kept = history().annotations;
  kept.push_back(std::move(entry));
  while (kept.size() > history().max_annotations) {
    kept.pop_front();
  }
}

void Allocator::setUserMetadata(const std::string& metadata) {
  if (!metadata.empty()) {
    TORCH_WARN_ONCE(
        "esper_alloc does not record user metadata (_set_memory_metadata) in "
        "its memory history yet.");
  }
}

} // namespace esper
