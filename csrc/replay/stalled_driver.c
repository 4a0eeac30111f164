#include "stalled_driver.h"

#include <stdlib.h>

/* A stream's newest stall, and up to which it is released. An event has the stall after which it
 * was recorded; one for all streams has no stream, and the number of the newest stall. */
typedef struct stall {
  void *stream;
  uint64_t number, released;
} stall;

/* A hash map from streams or events to stalls, with open addressing. Empty slots have a NULL key,
 * removed ones the address of the map itself. The legacy stream, NULL, is never stalled. */
typedef struct map {
  const void **keys;
  stall *values;
  size_t capacity; /* a power of two, or 0 */
  size_t filled;   /* slots that are not empty */
} map;

static size_t hash_key(const void *key)
{
  uint64_t bits = (uint64_t)(uintptr_t)key * UINT64_C(0x9E3779B97F4A7C15);
  return (size_t)(bits >> 32);
}

static stall *map_find(const map *m, const void *key)
{
  if (m->capacity == 0)
    return NULL;
  size_t mask = m->capacity - 1;
  for (size_t i = hash_key(key) & mask; m->keys[i]; i = (i + 1) & mask)
    if (m->keys[i] == key)
      return &m->values[i];
  return NULL;
}

static void map_place(map *m, const void *key, stall value)
{
  size_t mask = m->capacity - 1;
  size_t i = hash_key(key) & mask;
  while (m->keys[i])
    i = (i + 1) & mask;
  m->keys[i] = key;
  m->values[i] = value;
  m->filled++;
}

/* Makes the map large enough and drops removed slots. */
static int map_rebuild(map *m)
{
  size_t alive = 0;
  for (size_t i = 0; i < m->capacity; i++)
    alive += m->keys[i] && m->keys[i] != (const void *)m;
  size_t capacity = 16;
  while (capacity < 4 * (alive + 1))
    capacity *= 2;

  map fresh = {calloc(capacity, sizeof *fresh.keys), calloc(capacity, sizeof *fresh.values),
               capacity, 0};
  if (!fresh.keys || !fresh.values) {
    free(fresh.keys);
    free(fresh.values);
    return 0;
  }
  for (size_t i = 0; i < m->capacity; i++)
    if (m->keys[i] && m->keys[i] != (const void *)m)
      map_place(&fresh, m->keys[i], m->values[i]);
  free(m->keys);
  free(m->values);
  *m = fresh;
  return 1;
}

/* Makes sure that one more key fits. 0: no host memory. */
static int map_reserve(map *m)
{
  return 2 * (m->filled + 1) <= m->capacity || map_rebuild(m);
}

static void map_remove(map *m, const void *key)
{
  stall *value = map_find(m, key);
  if (value)
    m->keys[value - m->values] = m;
}

static void map_free(map *m)
{
  free(m->keys);
  free(m->values);
}

struct stalled_driver {
  esper_driver face;
  const esper_driver *below;
  map streams; /* streams that are stalled now */
  map events;  /* events recorded on a stalled stream, or on all streams */
  uint64_t stalls;
};

/* A stalled stream that has not been released since `then`: its own stream, or with no stream any
 * that may have been stalled at that time. NULL: none. */
static void *stalled_since(const stalled_driver *d, stall then)
{
  if (then.stream) {
    const stall *now = map_find(&d->streams, then.stream);
    return now && now->released < then.number ? now->stream : NULL;
  }
  for (size_t i = 0; i < d->streams.capacity; i++) {
    const void *key = d->streams.keys[i];
    if (key && key != (const void *)&d->streams && d->streams.values[i].released < then.number)
      return d->streams.values[i].stream;
  }
  return NULL;
}

uint64_t stalled_driver_stall(stalled_driver *d, void *stream)
{
  stall *now = map_find(&d->streams, stream);
  if (now)
    return now->number = ++d->stalls;
  if (!map_reserve(&d->streams))
    return 0;
  map_place(&d->streams, stream, (stall){stream, d->stalls + 1, d->stalls});
  return ++d->stalls;
}

void stalled_driver_release(stalled_driver *d, void *stream, uint64_t number)
{
  stall *now = map_find(&d->streams, stream);
  if (now && number >= now->number)
    map_remove(&d->streams, stream);
  else if (now && number > now->released)
    now->released = number;
}

/* Releases the streams whose stalls keep the event pending. */
static void release_event(stalled_driver *d, const void *event)
{
  const stall *then = map_find(&d->events, event);
  void *stream;
  while (then && (stream = stalled_since(d, *then)))
    stalled_driver_release(d, stream, then->number);
}

/* The functions whose answers depend on stalled work. */

static esper_status stalled_event_record(void *self, int device, void *event, void *stream)
{
  stalled_driver *d = self;
  const stall *now = map_find(&d->streams, stream);
  if (now && !map_reserve(&d->events))
    return ESPER_HOST_MEMORY;
  esper_status status = d->below->event_record(d->below->self, device, event, stream);
  if (status != ESPER_OK)
    return status;
  map_remove(&d->events, event);
  if (now)
    map_place(&d->events, event, *now);
  return ESPER_OK;
}

static esper_status stalled_event_record_all(void *self, int device, void *event)
{
  stalled_driver *d = self;
  if (!map_reserve(&d->events))
    return ESPER_HOST_MEMORY;
  esper_status status = d->below->event_record_all(d->below->self, device, event);
  if (status != ESPER_OK)
    return status;
  map_remove(&d->events, event);
  map_place(&d->events, event, (stall){.number = d->stalls});
  return ESPER_OK;
}

static esper_status stalled_event_query(void *self, int device, void *event)
{
  stalled_driver *d = self;
  esper_status status = d->below->event_query(d->below->self, device, event);
  if (status != ESPER_OK)
    return status;
  const stall *then = map_find(&d->events, event);
  return then && stalled_since(d, *then) ? ESPER_NOT_READY : ESPER_OK;
}

static esper_status stalled_event_synchronize(void *self, int device, void *event)
{
  stalled_driver *d = self;
  esper_status status = d->below->event_synchronize(d->below->self, device, event);
  if (status == ESPER_OK)
    release_event(d, event);
  return status;
}

static esper_status stalled_event_wait(void *self, int device, void *event, unsigned microseconds)
{
  stalled_driver *d = self;
  esper_status status = d->below->event_wait(d->below->self, device, event, microseconds);
  if (status == ESPER_OK)
    release_event(d, event);
  return status;
}

static esper_status stalled_device_synchronize(void *self, int device)
{
  stalled_driver *d = self;
  esper_status status = d->below->device_synchronize(d->below->self, device);
  if (status != ESPER_OK)
    return status;
  for (size_t i = 0; i < d->streams.capacity; i++)
    if (d->streams.keys[i])
      d->streams.keys[i] = &d->streams;
  return ESPER_OK;
}

static esper_status stalled_stream_wait(void *self, int device, void *stream, void *event)
{
  stalled_driver *d = self;
  esper_status status = d->below->stream_wait(d->below->self, device, stream, event);
  if (status == ESPER_OK)
    release_event(d, event);
  return status;
}

static esper_status stalled_event_destroy(void *self, int device, void *event)
{
  stalled_driver *d = self;
  esper_status status = d->below->event_destroy(d->below->self, device, event);
  if (status == ESPER_OK)
    map_remove(&d->events, event);
  return status;
}

static esper_status stalled_stream_destroy(void *self, int device, void *stream)
{
  stalled_driver *d = self;
  esper_status status = d->below->stream_destroy(d->below->self, device, stream);
  if (status == ESPER_OK)
    map_remove(&d->streams, stream);
  return status;
}

/* The others pass through. */

#define PASS(name, parameters, ...)                              \
  static esper_status stalled_##name parameters                  \
  {                                                              \
    const esper_driver *below = ((stalled_driver *)self)->below; \
    return below->name(below->self, __VA_ARGS__);                \
  }

PASS(device_count, (void *self, int *count), count)
PASS(memory_info, (void *self, int device, size_t *free, size_t *total), device, free, total)
PASS(memory_total, (void *self, int device, size_t *total), device, total)
PASS(memory_alloc, (void *self, int device, size_t size, uintptr_t *address), device, size, address)
PASS(memory_free, (void *self, int device, uintptr_t address), device, address)
PASS(page_granularity, (void *self, int device, size_t *bytes), device, bytes)
PASS(range_reserve, (void *self, int device, size_t size, uintptr_t *address), device, size,
     address)
PASS(range_free, (void *self, int device, uintptr_t address, size_t size), device, address, size)
PASS(page_create, (void *self, int device, size_t size, uint64_t *page), device, size, page)
PASS(page_release, (void *self, int device, uint64_t page), device, page)
PASS(page_map,
     (void *self, int device, uintptr_t address, size_t size, uint64_t page, const int *peers,
      int count),
     device, address, size, page, peers, count)
PASS(page_unmap, (void *self, int device, uintptr_t address, size_t size), device, address, size)
PASS(page_access, (void *self, int device, uintptr_t address, size_t size, int peer), device,
     address, size, peer)
PASS(peer_check, (void *self, int device, int peer), device, peer)
PASS(page_export, (void *self, int device, uint64_t page, esper_page_name *name), device, page,
     name)
PASS(page_unexport, (void *self, int device, const esper_page_name *name), device, name)
PASS(page_import, (void *self, int device, const esper_page_name *name, uint64_t *page), device,
     name, page)
PASS(stream_id, (void *self, int device, void *stream, uint64_t *id), device, stream, id)
PASS(stream_capture, (void *self, int device, void *stream, uint64_t *capture), device, stream,
     capture)
PASS(capture_tails,
     (void *self, int device, void *stream, uint64_t capture, void **tails, size_t *count), device,
     stream, capture, tails, count)
PASS(capture_before,
     (void *self, int device, void *stream, uint64_t capture, void *node, void **before,
      size_t *count),
     device, stream, capture, node, before, count)
PASS(stream_create, (void *self, int device, void **stream), device, stream)
PASS(event_create, (void *self, int device, void **event), device, event)

static const char *stalled_last_error(void *self)
{
  const esper_driver *below = ((stalled_driver *)self)->below;
  return below->last_error(below->self);
}

stalled_driver *stalled_driver_create(const esper_driver *below)
{
  stalled_driver *d = calloc(1, sizeof *d);
  if (!d)
    return NULL;
  d->below = below;
  d->face = (esper_driver){
      .name = below->name,
      .self = d,
      .device_count = stalled_device_count,
      .memory_info = stalled_memory_info,
      .memory_total = stalled_memory_total,
      .device_synchronize = stalled_device_synchronize,
      .memory_alloc = stalled_memory_alloc,
      .memory_free = stalled_memory_free,
      .page_granularity = stalled_page_granularity,
      .range_reserve = stalled_range_reserve,
      .range_free = stalled_range_free,
      .page_create = stalled_page_create,
      .page_release = stalled_page_release,
      .page_map = stalled_page_map,
      .page_unmap = stalled_page_unmap,
      .page_access = stalled_page_access,
      .peer_check = stalled_peer_check,
      .page_export = stalled_page_export,
      .page_unexport = stalled_page_unexport,
      .page_import = stalled_page_import,
      .stream_id = stalled_stream_id,
      .stream_capture = stalled_stream_capture,
      .capture_tails = stalled_capture_tails,
      .capture_before = stalled_capture_before,
      .stream_create = stalled_stream_create,
      .stream_destroy = stalled_stream_destroy,
      .stream_wait = stalled_stream_wait,
      .event_create = stalled_event_create,
      .event_destroy = stalled_event_destroy,
      .event_record = stalled_event_record,
      .event_record_all = stalled_event_record_all,
      .event_query = stalled_event_query,
      .event_synchronize = stalled_event_synchronize,
      .event_wait = stalled_event_wait,
      .last_error = stalled_last_error,
  };
  return d;
}

void stalled_driver_destroy(stalled_driver *d)
{
  if (!d)
    return;
  map_free(&d->streams);
  map_free(&d->events);
  free(d);
}

const esper_driver *stalled_driver_functions(stalled_driver *d)
{
  return &d->face;
}
