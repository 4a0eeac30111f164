#include "audit_order.h"

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/function.h>

#include "../automatic/automatic.h"
#include "../base/core_api.h"
#include "../debugging/fence.h"
#include "../uses/mark_watch.h"
#include "audit_operators.h"
#include "gpu_trace.h"

namespace esper::auditing
{

namespace
{

using c10::cuda::CUDAStream;

// The stream that the memory was allocated on. PyTorch's own allocator does not tell: there it is
// taken to be the current one.
audit_stream home_of(uintptr_t address)
{
  esper_core *made = core_if_made();
  esper_block_info block{};
  if (made != nullptr &&
      capi().find_block(made, reinterpret_cast<const void *>(address), &block) == ESPER_OK) {
    return {block.device, reinterpret_cast<uint64_t>(block.stream)};
  }
  return name_of(c10::cuda::getCurrentCUDAStream());
}

void memory_allocated(uintptr_t address)
{
  if (!running.load(std::memory_order_relaxed)) {
    return;
  }
  const audit_stream stream = home_of(address);
  const uint32_t site = site_now();
  const Operation *operation = operation_now();
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
    // With automatic uses the memory keeps its pages until that use is over.
    const bool may_fault = fence::is_on() && !are_uses_noted();
    const audit_finding *in_use = may_fault ? functions->last_free(engine) : nullptr;
    if (in_use != nullptr) {
      fence::is_freed_in_use(address, *in_use);
    }
    a.gradients.erase(address);
  });
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

const MarkWatcher watcher = {
    [](const void *ptr, CUDAStream stream, bool until_free) {
      const uint32_t site = site_now();
      tell_order([&](audit *engine) {
        functions->marked(engine, reinterpret_cast<uintptr_t>(ptr), name_of(stream),
                          until_free ? 1 : 0, site);
      });
    },
    [](const void *ptr, const RecordedEvent &event) {
      const uint32_t site = site_now();
      tell_order([&](audit *engine) {
        functions->marked_by_event(engine, reinterpret_cast<uintptr_t>(ptr),
                                   reinterpret_cast<uint64_t>(event.handle), site);
      });
    },
    [](const void *ptr) {
      tell_order([&](audit *engine) { functions->held(engine, reinterpret_cast<uintptr_t>(ptr)); });
    }};

} // namespace

void watch_order()
{
  listen_to_gpu_trace(&listener);
  watch_marks_with(&watcher);
}

void stop_watching_order()
{
  watch_marks_with(nullptr);
  listen_to_gpu_trace(nullptr);
}

} // namespace esper::auditing
