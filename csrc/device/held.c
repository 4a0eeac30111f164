#include "held.h"

#include <stdlib.h>

/* Every hold has a number of its own, so that a stream that is held again
 * does not bring back what an earlier hold kept pending. */
typedef struct hold {
  void *stream;
  uint64_t number;
} hold;

/* Streams or events to holds; open addressing. Empty slots have a NULL key,
 * removed ones the address of the map itself. The legacy stream, NULL, is
 * never held. */
typedef struct map {
  const void **keys;
  hold *values;
  size_t capacity; /* a power of two, or 0 */
  size_t filled;   /* slots that are not empty */
} map;

static size_t hash_key(const void *key)
{
  uint64_t bits = (uint64_t)(uintptr_t)key * UINT64_C(0x9E3779B97F4A7C15);
  return (size_t)(bits >> 32);
}

static hold *map_find(const map *m, const void *key)
{
  if (m->capacity == 0)
    return NULL;
  size_t mask = m->capacity - 1;
  for (size_t i = hash_key(key) & mask; m->keys[i]; i = (i + 1) & mask)
    if (m->keys[i] == key)
      return &m->values[i];
  return NULL;
}

static void map_place(map *m, const void *key, hold value)
{
  size_t mask = m->capacity - 1;
  size_t i = hash_key(key) & mask;
  while (m->keys[i])
    i = (i + 1) & mask;
  m->keys[i] = key;
  m->values[i] = value;
  m->filled++;
}

/* Twice the room that the keys need; removed slots are dropped on the way. */
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

/* Makes sure that one more key fits; 0: no host memory. */
static int map_reserve(map *m)
{
  return 2 * (m->filled + 1) <= m->capacity || map_rebuild(m);
}

static void map_remove(map *m, const void *key)
{
  hold *value = map_find(m, key);
  if (value)
    m->keys[value - m->values] = m;
}

static void map_free(map *m)
{
  free(m->keys);
  free(m->values);
}

struct held {
  esper_driver face;
  const esper_driver *below;
  map streams; /* streams that are held now */
  map events;  /* events that were recorded on a stream while it was held */
  uint64_t holds;
};

/* Whether the event is pending because its stream is still held. */
static int is_held(const held *h, const void *event, void **stream)
{
  const hold *then = map_find(&h->events, event);
  const hold *now = then ? map_find(&h->streams, then->stream) : NULL;
  if (!now || now->number != then->number)
    return 0;
  *stream = now->stream;
  return 1;
}

int held_hold(held *h, void *stream)
{
  if (map_find(&h->streams, stream))
    return 1;
  if (!map_reserve(&h->streams))
    return 0;
  map_place(&h->streams, stream, (hold){stream, ++h->holds});
  return 1;
}

void held_release(held *h, void *stream)
{
  map_remove(&h->streams, stream);
}

/* Waiting for an event lasts until its hold is over. */
static void release_event(held *h, const void *event)
{
  void *stream;
  if (is_held(h, event, &stream))
    held_release(h, stream);
}

/* The functions whose answers depend on held work. */

static esper_status held_event_record(void *self, int device, void *event, void *stream)
{
  held *h = self;
  const hold *now = map_find(&h->streams, stream);
  if (now && !map_reserve(&h->events))
    return ESPER_HOST_MEMORY;
  esper_status status = h->below->event_record(h->below->self, device, event, stream);
  if (status != ESPER_OK)
    return status;
  map_remove(&h->events, event);
  if (now)
    map_place(&h->events, event, *now);
  return ESPER_OK;
}

/* Several holds at once are more than an event can be put down to here. */
static esper_status held_event_record_all(void *self, int device, void *event)
{
  held *h = self;
  for (size_t i = 0; i < h->streams.capacity; i++)
    if (h->streams.keys[i] && h->streams.keys[i] != (const void *)&h->streams)
      return ESPER_UNSUPPORTED;
  esper_status status = h->below->event_record_all(h->below->self, device, event);
  if (status == ESPER_OK)
    map_remove(&h->events, event);
  return status;
}

static esper_status held_event_query(void *self, int device, void *event)
{
  held *h = self;
  esper_status status = h->below->event_query(h->below->self, device, event);
  void *stream;
  if (status != ESPER_OK)
    return status;
  return is_held(h, event, &stream) ? ESPER_NOT_READY : ESPER_OK;
}

static esper_status held_event_synchronize(void *self, int device, void *event)
{
  held *h = self;
  esper_status status = h->below->event_synchronize(h->below->self, device, event);
  if (status == ESPER_OK)
    release_event(h, event);
  return status;
}

static esper_status held_device_synchronize(void *self, int device)
{
  held *h = self;
  esper_status status = h->below->device_synchronize(h->below->self, device);
  if (status != ESPER_OK)
    return status;
  for (size_t i = 0; i < h->streams.capacity; i++)
    if (h->streams.keys[i])
      h->streams.keys[i] = &h->streams;
  return ESPER_OK;
}

static esper_status held_stream_wait(void *self, int device, void *stream, void *event)
{
  held *h = self;
  esper_status status = h->below->stream_wait(h->below->self, device, stream, event);
  if (status == ESPER_OK)
    release_event(h, event);
  return status;
}

static esper_status held_event_destroy(void *self, int device, void *event)
{
  held *h = self;
  esper_status status = h->below->event_destroy(h->below->self, device, event);
  if (status == ESPER_OK)
    map_remove(&h->events, event);
  return status;
}

static esper_status held_stream_destroy(void *self, int device, void *stream)
{
  held *h = self;
  esper_status status = h->below->stream_destroy(h->below->self, device, stream);
  if (status == ESPER_OK)
    held_release(h, stream);
  return status;
}

/* The others pass through. */

#define PASS(name, parameters, ...)                    \
  static esper_status held_##name parameters           \
  {                                                    \
    const esper_driver *below = ((held *)self)->below; \
    return below->name(below->self, __VA_ARGS__);      \
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
PASS(page_access, (void *self, int device, uintptr_t address, size_t size, int peer, int allowed),
     device, address, size, peer, allowed)
PASS(peer_check, (void *self, int device, int peer), device, peer)
PASS(page_export, (void *self, int device, uint64_t page, esper_page_name *name), device, page,
     name)
PASS(page_unexport, (void *self, int device, const esper_page_name *name), device, name)
PASS(page_import, (void *self, int device, const esper_page_name *name, uint64_t *page), device,
     name, page)
PASS(stream_id, (void *self, int device, void *stream, uint64_t *id), device, stream, id)
PASS(stream_capture, (void *self, int device, void *stream, uint64_t *capture), device, stream,
     capture)
PASS(capture_point, (void *self, int device, void *stream, uint64_t capture, void **node), device,
     stream, capture, node)
PASS(capture_depend, (void *self, int device, void *stream, uint64_t capture, void *node), device,
     stream, capture, node)
PASS(capture_before,
     (void *self, int device, void *stream, uint64_t capture, void *node, void **before,
      size_t *count),
     device, stream, capture, node, before, count)
PASS(stream_create, (void *self, int device, void **stream), device, stream)
PASS(event_create, (void *self, int device, void **event), device, event)

static const char *held_last_error(void *self)
{
  const esper_driver *below = ((held *)self)->below;
  return below->last_error(below->self);
}

held *held_create(const esper_driver *below)
{
  held *h = calloc(1, sizeof *h);
  if (!h)
    return NULL;
  h->below = below;
  h->face = (esper_driver){
      .name = below->name,
      .self = h,
      .device_count = held_device_count,
      .memory_info = held_memory_info,
      .memory_total = held_memory_total,
      .device_synchronize = held_device_synchronize,
      .memory_alloc = held_memory_alloc,
      .memory_free = held_memory_free,
      .page_granularity = held_page_granularity,
      .range_reserve = held_range_reserve,
      .range_free = held_range_free,
      .page_create = held_page_create,
      .page_release = held_page_release,
      .page_map = held_page_map,
      .page_unmap = held_page_unmap,
      .page_access = held_page_access,
      .peer_check = held_peer_check,
      .page_export = held_page_export,
      .page_unexport = held_page_unexport,
      .page_import = held_page_import,
      .stream_id = held_stream_id,
      .stream_capture = held_stream_capture,
      .capture_point = held_capture_point,
      .capture_depend = held_capture_depend,
      .capture_before = held_capture_before,
      .stream_create = held_stream_create,
      .stream_destroy = held_stream_destroy,
      .stream_wait = held_stream_wait,
      .event_create = held_event_create,
      .event_destroy = held_event_destroy,
      .event_record = held_event_record,
      .event_record_all = held_event_record_all,
      .event_query = held_event_query,
      .event_synchronize = held_event_synchronize,
      .last_error = held_last_error,
  };
  return h;
}

void held_destroy(held *h)
{
  if (!h)
    return;
  map_free(&h->streams);
  map_free(&h->events);
  free(h);
}

const esper_driver *held_driver(held *h)
{
  return &h->face;
}
