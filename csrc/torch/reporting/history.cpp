// torch.cuda.memory._record_memory_history(), annotations, trackers.
#include "history.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <stack>
#include <unordered_map>

#include "../base/allocator.h"
#include "../base/gil.h"
#include "../start/the_core.h"
#include "nccl_registration.h"

namespace esper
{

namespace
{

std::atomic<RecordContext> gathered_from{RecordContext::NEVER}; // NEVER: frames are not wanted

// ---- what a thread says of itself ------------------------------------------

struct Thread {
  Context context; // of the current call
  std::stack<std::string> compiling;
  std::string metadata;
};

// Destructors of other thread-local objects may call this after the destructor here. A new object
// is then made, and never freed.
Thread &thread()
{
  static thread_local Thread *current = nullptr;
  struct Owner {
    ~Owner()
    {
      delete std::exchange(current, nullptr);
    }
  };
  if (C10_UNLIKELY(current == nullptr)) {
    current = new Thread();
    static thread_local Owner owner;
    (void)owner;
  }
  return *current;
}

// ---- what is kept ----------------------------------------------------------

// The trace of one device. Its lock is taken under the core's lock of that device, so a thread that
// holds it must not call the core or wait for Python.
struct Trace {
  std::mutex mutex;
  std::deque<TraceEntry> entries;
  std::unordered_map<uintptr_t, Context> blocks;
  // Ordered by address, because memory mapped piece by piece may be unmapped at once.
  std::map<uintptr_t, Context> segments;
};

struct History {
  std::mutex mutex; // for changes, and for the annotations
  std::atomic<bool> recording{false};
  std::atomic<CreateContextFn> gather{nullptr};
  std::atomic<size_t> max_entries{1};
  std::atomic<unsigned> skipped{0}; // a bit for each action
  std::atomic<size_t> device_count{0};
  std::unique_ptr<Trace[]> devices;
  std::deque<AnnotationEntry> annotations;
};

History &history()
{
  static auto *instance = new History();
  return *instance;
}

Trace *trace_of(int device)
{
  auto &h = history();
  const auto count = h.device_count.load(std::memory_order_acquire);
  return static_cast<size_t>(device) < count ? &h.devices[device] : nullptr;
}

unsigned bit_of(TraceEntry::Action action)
{
  return 1u << static_cast<unsigned>(action);
}

unsigned parse_actions(const std::vector<std::string> &names)
{
  unsigned actions = 0;
  for (const auto &name : names) {
    actions |= bit_of(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
  }
  return actions;
}

template <class Contexts>
Context find(const Contexts &contexts, uintptr_t address)
{
  const auto found = contexts.find(address);
  return found == contexts.end() ? nullptr : found->second;
}

template <class Contexts>
Context context_of(int device, Contexts Trace::*contexts, uintptr_t address)
{
  Trace *trace = trace_of(device);
  if (trace == nullptr) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(trace->mutex);
  return find(trace->*contexts, address);
}

template <class Contexts>
void keep(Contexts &contexts, uintptr_t address, const Context &context)
{
  if (context) {
    contexts[address] = context;
  } else {
    contexts.erase(address);
  }
}

// The frames for an action: those of the current call, or those that the memory came from. Forgets
// the frames of memory that is gone.
Context context_of(Trace &trace, const esper_trace_entry &entry)
{
  const Context now = thread().context;
  Context context = now;
  switch (entry.action) {
  case ESPER_TRACE_ALLOC: keep(trace.blocks, entry.address, now); break;
  case ESPER_TRACE_FREE_REQUESTED:
  case ESPER_TRACE_FREE_COMPLETED:
    if (!context) {
      context = find(trace.blocks, entry.address);
    }
    if (entry.action == ESPER_TRACE_FREE_COMPLETED) {
      trace.blocks.erase(entry.address);
    }
    break;
  case ESPER_TRACE_SEGMENT_ALLOC:
  case ESPER_TRACE_SEGMENT_MAP: keep(trace.segments, entry.address, now); break;
  case ESPER_TRACE_SEGMENT_FREE:
  case ESPER_TRACE_SEGMENT_UNMAP:
    if (!context) {
      context = find(trace.segments, entry.address);
    }
    trace.segments.erase(trace.segments.lower_bound(entry.address),
                         trace.segments.lower_bound(entry.address + entry.size));
    break;
  default: break; // an action without frames of its own
  }
  return context;
}

// The actions after these are told to the black box alone.
TraceEntry::Action convert(esper_action action)
{
  static constexpr TraceEntry::Action of[] = {
      TraceEntry::ALLOC,         TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED,
      TraceEntry::SEGMENT_ALLOC, TraceEntry::SEGMENT_FREE,   TraceEntry::SEGMENT_MAP,
      TraceEntry::SEGMENT_UNMAP, TraceEntry::SNAPSHOT,       TraceEntry::OOM};
  static_assert(std::size(of) == ESPER_TRACE_OOM + 1);
  return of[action];
}

TraceEntry make_entry(TraceEntry::Action action, const esper_trace_entry &from, Context context)
{
  const bool wanted = gathered_from.load(std::memory_order_relaxed) >= RecordContext::ALLOC;
  const Thread &caller = thread();
  TraceEntry entry(action, static_cast<c10::DeviceIndex>(from.device), from.address, from.size,
                   from.stream, c10::MempoolId_t{from.pool[0], from.pool[1]}, c10::approx_time_t{},
                   wanted ? std::move(context) : nullptr,
                   caller.compiling.empty() ? "N/A" : caller.compiling.top(), caller.metadata);
  entry.time_.t_ = static_cast<time_t>(from.time_us);
  return entry;
}

// With the trace's lock held.
void keep_entry(Trace &trace, TraceEntry entry)
{
  if (history().skipped.load(std::memory_order_relaxed) & bit_of(entry.action_)) {
    return;
  }
  trace.entries.push_back(std::move(entry));
  while (trace.entries.size() > history().max_entries.load()) {
    trace.entries.pop_front();
  }
}

// For actions that the core does not report.
void keep_and_tell(Trace &trace, bool recording, const Trackers *trackers, const TraceEntry &entry)
{
  if (recording) {
    std::lock_guard<std::mutex> lock(trace.mutex);
    keep_entry(trace, entry);
  }
  tell_trackers(trackers, entry);
}

// Called by the core, which is C, under its device's lock.
void watch(void * /*context*/, const esper_trace_entry *from) noexcept
{
  Trace *trace = trace_of(from->device);
  if (trace == nullptr) {
    return;
  }
  try {
    auto &h = history();
    const Trackers *trackers = attached_trackers();
    std::unique_lock<std::mutex> lock(trace->mutex);
    Context context = context_of(*trace, *from);
    const bool recording = h.recording.load(std::memory_order_relaxed);
    if (!recording && trackers == nullptr) {
      return;
    }
    TraceEntry entry = make_entry(convert(from->action), *from, std::move(context));
    if (trackers == nullptr) {
      keep_entry(*trace, std::move(entry));
      return;
    }
    if (recording) {
      keep_entry(*trace, entry);
    }
    lock.unlock(); // the core's lock keeps the order
    tell_trackers(trackers, entry);
  } catch (...) {
    // No host memory, or a tracker threw: the allocator continues.
  }
}

// ---- when there is something to watch for ----------------------------------

void watch_core(History &h)
{
  esper_core *made = core();
  if (!h.devices) {
    const int count = capi().device_count(made);
    h.devices = std::make_unique<Trace[]>(static_cast<size_t>(count));
    h.device_count.store(static_cast<size_t>(count), std::memory_order_release);
  }
  capi().trace_watch(made, &watch, nullptr);
}

// Whether actions must still be watched. Frames of live memory are kept after the recording has
// stopped, until that memory goes.
bool is_needed(History &h)
{
  if (h.recording.load() || attached_trackers() != nullptr) {
    return true;
  }
  for (size_t i = 0; i < h.device_count.load(); ++i) {
    std::lock_guard<std::mutex> lock(h.devices[i].mutex);
    if (!h.devices[i].blocks.empty() || !h.devices[i].segments.empty()) {
      return true;
    }
  }
  return false;
}

// A call that was running when watching ended may still have kept its frames, and nothing would
// notice when that memory goes.
void forget_frames(History &h)
{
  for (size_t i = 0; i < h.device_count.load(); ++i) {
    std::unordered_map<uintptr_t, Context> blocks; // freed without the lock
    std::map<uintptr_t, Context> segments;
    std::lock_guard<std::mutex> lock(h.devices[i].mutex);
    blocks.swap(h.devices[i].blocks);
    segments.swap(h.devices[i].segments);
  }
}

void clear_entries(History &h)
{
  for (size_t i = 0; i < h.device_count.load(); ++i) {
    std::deque<TraceEntry> gone; // frames are let go of without the lock
    std::lock_guard<std::mutex> lock(h.devices[i].mutex);
    gone.swap(h.devices[i].entries);
  }
  h.annotations.clear();
}

void trim_entries(History &h)
{
  const size_t most = h.max_entries.load();
  for (size_t i = 0; i < h.device_count.load(); ++i) {
    std::lock_guard<std::mutex> lock(h.devices[i].mutex);
    auto &entries = h.devices[i].entries;
    while (entries.size() > most) {
      entries.pop_front();
    }
  }
}

} // namespace

// ---- for the calls ---------------------------------------------------------

void CallContext::gather(RecordContext level)
{
  if (gathered_from.load(std::memory_order_relaxed) < level) {
    return;
  }
  const CreateContextFn gather_frames = history().gather.load();
  if (gather_frames == nullptr || esper_py_is_there() == 0) {
    return;
  }
  Context gathered;
  try {
    gathered = gather_frames();
    outer_ = std::make_unique<Context>();
  } catch (const std::exception &) {
    return; // the action has no frames; it goes on, as a free must
  }
  *outer_ = std::exchange(thread().context, std::move(gathered));
}

void CallContext::leave()
{
  thread().context = std::move(*outer_);
}

time_t microseconds_since_1970()
{
  using namespace std::chrono;
  return static_cast<time_t>(
      duration_cast<microseconds>(system_clock::now().time_since_epoch()).count());
}

std::vector<TraceEntry> copy_trace(int device)
{
  Trace *trace = trace_of(device);
  if (trace == nullptr) {
    return {};
  }
  std::lock_guard<std::mutex> lock(trace->mutex);
  return {trace->entries.begin(), trace->entries.end()};
}

void trace_snapshot(int device, size_t active, c10::MempoolId_t pool)
{
  Trace *trace = trace_of(device);
  auto &h = history();
  const Trackers *trackers = attached_trackers();
  const bool recording = h.recording.load();
  if (trace == nullptr || (!recording && trackers == nullptr)) {
    return;
  }
  esper_trace_entry from{};
  from.device = device;
  from.size = active;
  from.pool[0] = pool.first;
  from.pool[1] = pool.second;
  from.time_us = microseconds_since_1970();
  keep_and_tell(*trace, recording, trackers, make_entry(TraceEntry::SNAPSHOT, from, nullptr));
}

Context context_of_block(int device, uintptr_t address)
{
  return context_of(device, &Trace::blocks, address);
}

Context context_of_segment(int device, uintptr_t address)
{
  return context_of(device, &Trace::segments, address);
}

std::vector<AnnotationEntry> copy_annotations()
{
  std::lock_guard<std::mutex> lock(history().mutex);
  return {history().annotations.begin(), history().annotations.end()};
}

// ---- recording --------------------------------------------------------------

bool Allocator::isHistoryEnabled()
{
  return history().recording.load();
}

void Allocator::recordHistory(bool enabled, CreateContextFn gather_frames, size_t max_entries,
                              RecordContext when, bool clear_history,
                              const std::vector<std::string> &skip_actions)
{
  TORCH_CHECK(when == RecordContext::NEVER || gather_frames != nullptr,
              "recording stack frames needs a function that gathers them: pass context_recorder, "
              "or record without context");
  const unsigned skipped = parse_actions(skip_actions);
  auto &h = history();
  std::lock_guard<std::mutex> lock(h.mutex);
  if (enabled) {
    watch_core(h);
  }
  h.gather.store(enabled ? gather_frames : nullptr);
  h.skipped.store(skipped);
  h.max_entries.store(std::max<size_t>(max_entries, 1));
  h.recording.store(enabled);
  const RecordContext from = enabled ? when : RecordContext::NEVER;
  gathered_from.store(from);
  set_watcher(Watcher::FRAMES, from != RecordContext::NEVER);
  if (!enabled || clear_history) {
    clear_entries(h);
  }
  trim_entries(h);
  if (esper_core *made = core_if_made(); made != nullptr && !is_needed(h)) {
    capi().trace_watch(made, nullptr, nullptr);
    forget_frames(h);
  }
}

void Allocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>> &annotation)
{
  auto &h = history();
  if (!h.recording.load()) {
    return;
  }
  AnnotationEntry entry(c10::cuda::current_device(), c10::approx_time_t{});
  entry.time_.t_ = microseconds_since_1970();
  for (const auto &[key, value] : annotation) {
    entry.recordUserMetadata(key, value);
  }
  std::lock_guard<std::mutex> lock(h.mutex);
  h.annotations.push_back(std::move(entry));
  while (h.annotations.size() > h.max_entries.load()) {
    h.annotations.pop_front();
  }
}

void Allocator::pushCompileContext(std::string &context)
{
  if (isHistoryEnabled()) {
    thread().compiling.push(context);
  }
}

void Allocator::popCompileContext()
{
  if (isHistoryEnabled() && !thread().compiling.empty()) {
    thread().compiling.pop();
  }
}

bool Allocator::supportsUserMetadata()
{
  return true;
}

void Allocator::setUserMetadata(const std::string &metadata)
{
  thread().metadata = metadata;
}

std::string Allocator::getUserMetadata()
{
  return thread().metadata;
}

Context Allocator::getContextForPointer(const void *ptr)
{
  esper_block_info block;
  esper_core *made = core_if_made();
  if (made == nullptr || capi().find_block(made, ptr, &block) != ESPER_OK || block.address != ptr) {
    return nullptr;
  }
  return context_of_block(block.device, reinterpret_cast<uintptr_t>(ptr));
}

void Allocator::attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker)
{
  auto &h = history();
  std::lock_guard<std::mutex> lock(h.mutex);
  attach_tracker(std::move(tracker));
  watch_core(h);
}

// Annotations have an action of their own from PyTorch 2.15 on.
namespace
{
template <class Entry = TraceEntry>
auto annotation_action(int) -> decltype(Entry::ANNOTATE)
{
  return Entry::ANNOTATE;
}
template <class Entry = TraceEntry>
TraceEntry::Action annotation_action(long)
{
  return TraceEntry::SNAPSHOT; // never used there
}
} // namespace

void Allocator::annotateMemory(const void *ptr, const std::string &metadata)
{
  esper_block_info block;
  esper_core *made = core_if_made();
  TORCH_CHECK(made != nullptr && capi().find_block(made, ptr, &block) == ESPER_OK &&
                  block.address == ptr,
              "annotateMemory: no live allocation found at pointer ", ptr);
  const bool recording = isHistoryEnabled();
  const Trackers *trackers = attached_trackers();
  Trace *trace = trace_of(block.device);
  if (trace == nullptr || (!recording && trackers == nullptr)) {
    return;
  }
  const CallContext call(RecordContext::ALLOC);
  esper_trace_entry from{};
  from.device = block.device;
  from.address = reinterpret_cast<uintptr_t>(block.address);
  from.size = block.requested;
  from.stream = block.stream;
  from.pool[0] = block.pool[0];
  from.pool[1] = block.pool[1];
  from.time_us = microseconds_since_1970();
  TraceEntry entry = make_entry(annotation_action(0), from, thread().context);
  entry.user_metadata_ = metadata;
  keep_and_tell(*trace, recording, trackers, entry);
}

} // namespace esper
