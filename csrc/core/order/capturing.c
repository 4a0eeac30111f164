#include "capturing.h"

#include "../base/call.h"
#include "../base/config.h"

uint64_t stream_capture_of(presented_t p, bool recording)
{
  if (p.asked)
    return p.capture;
  if (p.stream->all_streams || (!p.handle && !recording))
    return 0;
  uint64_t capture = 0;
  esper_status status =
      call_stream_capture(p.stream->core, p.stream->device->index, p.handle, &capture);
  return status == ESPER_OK ? capture : CAPTURE_UNKNOWN;
}

bool stream_any_may_be_captured(const device_t *device)
{
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next)
    if (s->device == device && atomic_load_explicit(&s->was_captured, memory_order_relaxed))
      return true;
  return stream_any_is_captured(device);
}

bool stream_any_is_captured(const device_t *device)
{
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next)
    if (s->device == device && s->immortal && !s->all_streams &&
        stream_capture_of((presented_t){.stream = s, .handle = s->handle}, true))
      return true;
  return false;
}

void stream_forget_captures(const device_t *device)
{
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next)
    if (s->device == device)
      atomic_store_explicit(&s->was_captured, false, memory_order_relaxed);
}

bool capturing_is_possible(const device_t *device)
{
  return device->captures_announced > 0 ||
         (!config_of(device->core)->as_given.captures_are_announced && device->routes);
}

bool capturing_is_announced(device_t *device)
{
  lock(&device->lock);
  bool announced = device->captures_announced > 0;
  unlock(&device->lock);
  return announced;
}

bool capturing_is_possible_now(device_t *device)
{
  lock(&device->lock);
  bool may = capturing_is_possible(device);
  unlock(&device->lock);
  return may;
}
