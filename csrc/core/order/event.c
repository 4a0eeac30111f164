#include "event.h"

#include <stdlib.h>

#include "../base/arena.h"
#include "../base/call.h"
#include "../base/error.h"
#include "../base/rules.h"
#include "device.h"

static bool reserve(device_t *device)
{
  if (device->events_alive < device->event_capacity)
    return true;
  size_t capacity = device->event_capacity ? 2 * device->event_capacity : 64;
  void **events = realloc(device->events, capacity * sizeof *events);
  if (!events)
    return false;
  device->events = events;
  device->event_capacity = capacity;
  return true;
}

void *event_take(device_t *device)
{
  lock(&device->events_lock);
  if (device->event_count) {
    void *event = device->events[--device->event_count];
    unlock(&device->events_lock);
    return event;
  }
  if (!reserve(device)) {
    unlock(&device->events_lock);
    error_set(ESPER_HOST_MEMORY, "no host memory for an event");
    return NULL;
  }
  device->events_alive++;
  unlock(&device->events_lock);

  void *event;
  esper_status status = call_event_create(device->core, device->index, &event);
  lock(&device->events_lock);
  if (status != ESPER_OK)
    device->events_alive--;
  else
    device->events_created++;
  unlock(&device->events_lock);
  if (status == ESPER_OK)
    return event;
  error_from_driver(device->core, status);
  return NULL;
}

void event_give(device_t *device, void *event)
{
  lock(&device->events_lock);
  if (RULE(EVENTS_IMMUTABLE) || device->event_count < device->event_capacity)
    device->events[device->event_count++] = event;
  unlock(&device->events_lock);
}

record_t *record_take(device_t *device)
{
  lock(&device->events_lock);
  record_t *record = arena_take(&device->records);
  unlock(&device->events_lock);
  return record;
}

void record_give(device_t *device, record_t *record)
{
  lock(&device->events_lock);
  arena_give(&device->records, record);
  unlock(&device->events_lock);
}

bool records_are_valid(device_t *device)
{
  lock(&device->events_lock);
  bool valid = arena_is_valid(&device->records);
  unlock(&device->events_lock);
  return valid;
}

void event_destroy_all(device_t *device)
{
  while (device->event_count) {
    call_event_destroy(device->core, device->index, device->events[--device->event_count]);
    device->events_alive--;
  }
  free(device->events);
  device->events = NULL;
}
