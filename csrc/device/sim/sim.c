/* sim.c: the driver's functions, and a simulation's lifetime and settings. */
#include "sim.h"

#include <stdlib.h>

#include "address.h"
#include "base.h"
#include "call.h"
#include "capture.h"
#include "contents.h"
#include "copies.h"
#include "event.h"
#include "memory.h"
#include "oracle.h"
#include "queue.h"
#include "stream.h"

/* ---- the driver's functions -------------------------------------------- */

/* Begins a call and returns with the lock held. Any status but ESPER_OK must be returned at
 * once. */
static esper_status begin(sim *s, sim_call call, int device, void *object)
{
  sim_call_hook(s, call, 0, device, object);
  sim_enter(s);
  if (s->options.completion == SIM_SEEDED)
    sim_let_time_pass(s);
  esper_status status = sim_call_count(s, call);
  if (status != ESPER_OK)
    return status;
  if (device < 0 || device >= s->options.devices) {
    sim_report(s, "%s: there is no device %d\n", sim_call_name(call), device);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: no device %d", device);
  }
  return ESPER_OK;
}

static esper_status end(sim *s, sim_call call, int device, void *object, esper_status status)
{
  sim_leave(s);
  sim_call_hook(s, call, 1, device, object);
  return status;
}

#define BEGIN(call, object)                                          \
  sim *s = self;                                                     \
  esper_status status = begin(s, SIM_CALL_##call, device, (object)); \
  if (status == ESPER_OK) {
#define END(call, object) \
  }                       \
  return end(s, SIM_CALL_##call, device, (object), status)

static esper_status device_count(void *self, int *count)
{
  int device = 0;
  BEGIN(device_count, NULL)
  *count = s->options.devices;
  END(device_count, NULL);
}

static esper_status memory_info(void *self, int device, size_t *free_bytes, size_t *total)
{
  BEGIN(memory_info, NULL)
  const sim_device *d = &s->devices[device];
  *total = d->capacity;
  size_t used = d->alive.bytes + d->caches;
  *free_bytes = used < d->capacity ? d->capacity - used : 0;
  END(memory_info, NULL);
}

static esper_status memory_total(void *self, int device, size_t *total)
{
  BEGIN(memory_total, NULL)
  *total = s->devices[device].capacity;
  END(memory_total, NULL);
}

static esper_status device_synchronize(void *self, int device)
{
  BEGIN(device_synchronize, NULL)
  status = sim_wait_device(s, device);
  END(device_synchronize, NULL);
}

static esper_status memory_alloc(void *self, int device, size_t size, uintptr_t *address)
{
  BEGIN(memory_alloc, NULL)
  status = sim_memory_new(s, device, size, address);
  END(memory_alloc, NULL);
}

static esper_status memory_free(void *self, int device, uintptr_t address)
{
  BEGIN(memory_free, NULL)
  status = sim_memory_give_back(s, device, address);
  END(memory_free, NULL);
}

static esper_status page_granularity(void *self, int device, size_t *bytes)
{
  BEGIN(page_granularity, NULL)
  *bytes = s->options.virtual_memory ? s->options.page_granularity : 0;
  END(page_granularity, NULL);
}

static esper_status range_reserve(void *self, int device, size_t size, uintptr_t *address)
{
  BEGIN(range_reserve, NULL)
  status = sim_range_new(s, device, size, address);
  END(range_reserve, NULL);
}

static esper_status range_free(void *self, int device, uintptr_t address, size_t size)
{
  BEGIN(range_free, NULL)
  status = sim_range_give_back(s, device, address, size);
  END(range_free, NULL);
}

static esper_status page_create(void *self, int device, size_t size, uint64_t *page)
{
  BEGIN(page_create, NULL)
  status = sim_page_new(s, device, size, page);
  END(page_create, NULL);
}

static esper_status page_release(void *self, int device, uint64_t page)
{
  BEGIN(page_release, NULL)
  status = sim_page_give_back(s, device, page);
  END(page_release, NULL);
}

static esper_status page_map(void *self, int device, uintptr_t address, size_t size, uint64_t page,
                             const int *peers, int count)
{
  BEGIN(page_map, NULL)
  /* begin() refused a negative device. NOLINTNEXTLINE(clang-analyzer-core.BitwiseShift) */
  uint64_t access = (uint64_t)1 << device;
  for (int i = 0; i < count; i++)
    access |= (uint64_t)1 << peers[i];
  status = sim_page_put(s, device, address, size, page, access);
  END(page_map, NULL);
}

static esper_status page_unmap(void *self, int device, uintptr_t address, size_t size)
{
  BEGIN(page_unmap, NULL)
  status = sim_page_take(s, device, address, size);
  END(page_unmap, NULL);
}

static esper_status page_access(void *self, int device, uintptr_t address, size_t size, int peer)
{
  BEGIN(page_access, NULL)
  status = sim_page_open(s, device, address, size, peer);
  END(page_access, NULL);
}

static esper_status peer_check(void *self, int device, int peer)
{
  BEGIN(peer_check, NULL)
  if (s->unreachable)
    status = sim_refuse(ESPER_UNSUPPORTED, "sim: device %d cannot access the memory of device %d",
                        peer, device);
  END(peer_check, NULL);
}

static esper_status page_export(void *self, int device, uint64_t page, esper_page_name *name)
{
  BEGIN(page_export, NULL)
  status = sim_page_name(s, device, page, name);
  END(page_export, NULL);
}

static esper_status page_unexport(void *self, int device, const esper_page_name *name)
{
  BEGIN(page_unexport, NULL)
  status = sim_page_unname(s, device, name);
  END(page_unexport, NULL);
}

static esper_status page_import(void *self, int device, const esper_page_name *name, uint64_t *page)
{
  BEGIN(page_import, NULL)
  status = sim_page_named(s, device, name, page);
  END(page_import, NULL);
}

static esper_status host_alloc(void *self, int device, size_t size, void **memory)
{
  BEGIN(host_alloc, NULL)
  status = sim_host_new(s, device, size, memory);
  END(host_alloc, NULL);
}

static esper_status host_free(void *self, int device, void *memory)
{
  BEGIN(host_free, NULL)
  status = sim_host_give_back(s, device, memory);
  END(host_free, NULL);
}

static esper_status copy_to_host(void *self, int device, void *stream, void *to, uintptr_t from,
                                 size_t size)
{
  BEGIN(copy_to_host, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "copy_to_host");
  status = st ? sim_copy(s, SIM_OP_TO_HOST, st, from, to, size) : ESPER_DEVICE_ERROR;
  END(copy_to_host, stream);
}

static esper_status copy_to_device(void *self, int device, void *stream, uintptr_t to,
                                   const void *from, size_t size)
{
  BEGIN(copy_to_device, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "copy_to_device");
  status = st ? sim_copy(s, SIM_OP_TO_DEVICE, st, to, (void *)from, size) : ESPER_DEVICE_ERROR;
  END(copy_to_device, stream);
}

static esper_status memory_zero(void *self, int device, void *stream, uintptr_t address,
                                size_t size)
{
  BEGIN(memory_zero, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "memory_zero");
  status = st ? sim_copy(s, SIM_OP_ZERO, st, address, NULL, size) : ESPER_DEVICE_ERROR;
  END(memory_zero, stream);
}

static esper_status stream_id(void *self, int device, void *stream, uint64_t *id)
{
  BEGIN(stream_id, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "stream_id");
  if (st)
    *id = st->id;
  else
    status = ESPER_DEVICE_ERROR;
  END(stream_id, stream);
}

static esper_status stream_capture(void *self, int device, void *stream, uint64_t *capture)
{
  BEGIN(stream_capture, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "stream_capture");
  if (st)
    *capture = !st->capture ? 0 : st->capture->invalid ? ESPER_CAPTURE_INVALID : st->capture->id;
  else
    status = ESPER_DEVICE_ERROR;
  END(stream_capture, stream);
}

static esper_status stream_create(void *self, int device, void **stream)
{
  BEGIN(stream_create, NULL)
  *stream = sim_stream_new(s, device, 1);
  s->devices[device].alive.streams++;
  END(stream_create, NULL);
}

static esper_status stream_destroy(void *self, int device, void *stream)
{
  BEGIN(stream_destroy, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "stream_destroy");
  if (st) {
    sim_stream_kill(s, st);
    s->devices[device].alive.streams--;
  } else {
    status = ESPER_DEVICE_ERROR;
  }
  END(stream_destroy, stream);
}

static esper_status stream_wait(void *self, int device, void *stream, void *event)
{
  BEGIN(stream_wait, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "stream_wait");
  sim_event *e = sim_event_find(s, -1, event, "stream_wait");
  status = st && e ? sim_wait_stream(s, st, e, 1) : ESPER_DEVICE_ERROR;
  END(stream_wait, stream);
}

static esper_status capture_tails(void *self, int device, void *stream, uint64_t capture,
                                  void **tails, size_t *count)
{
  BEGIN(capture_tails, stream)
  const sim_stream *st = sim_stream_find(s, device, stream, "capture_tails");
  status = st ? sim_tails_now(st, capture, tails, count) : ESPER_DEVICE_ERROR;
  END(capture_tails, stream);
}

static esper_status capture_before(void *self, int device, void *stream, uint64_t capture,
                                   void *node, void **before, size_t *count)
{
  BEGIN(capture_before, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "capture_before");
  status = st ? sim_before_now(s, st, capture, node, before, count) : ESPER_DEVICE_ERROR;
  END(capture_before, stream);
}

static esper_status event_create(void *self, int device, void **event)
{
  BEGIN(event_create, NULL)
  *event = sim_event_new(s, device, 1);
  END(event_create, NULL);
}

static esper_status event_destroy(void *self, int device, void *event)
{
  BEGIN(event_destroy, event)
  if (sim_event_find(s, device, event, "event_destroy"))
    sim_event_kill(s, event);
  else
    status = ESPER_DEVICE_ERROR;
  END(event_destroy, event);
}

static esper_status event_record(void *self, int device, void *event, void *stream)
{
  BEGIN(event_record, stream)
  sim_stream *st = sim_stream_find(s, device, stream, "event_record");
  sim_event *e = sim_event_find(s, device, event, "event_record");
  if (!st || !e) {
    status = ESPER_DEVICE_ERROR;
  } else if (st->capture) {
    sim_report(s, "event_record on stream %llu, which is being captured\n",
               (unsigned long long)st->id);
    status = sim_refuse(ESPER_CAPTURING, "sim: the stream is being captured");
  } else {
    sim_record_now(s, st, e);
  }
  END(event_record, stream);
}

static esper_status event_record_all(void *self, int device, void *event)
{
  BEGIN(event_record_all, event)
  sim_event *e = sim_event_find(s, device, event, "event_record_all");
  status = e ? sim_record_all_now(s, device, e) : ESPER_DEVICE_ERROR;
  END(event_record_all, event);
}

static esper_status event_query(void *self, int device, void *event)
{
  BEGIN(event_query, event)
  sim_event *e = sim_event_find(s, device, event, "event_query");
  status = e ? sim_query_now(s, e) : ESPER_DEVICE_ERROR;
  END(event_query, event);
}

static esper_status event_synchronize(void *self, int device, void *event)
{
  BEGIN(event_synchronize, event)
  sim_event *e = sim_event_find(s, device, event, "event_synchronize");
  status = e ? sim_wait_host(s, e) : ESPER_DEVICE_ERROR;
  END(event_synchronize, event);
}

static esper_status event_wait(void *self, int device, void *event, unsigned microseconds)
{
  (void)microseconds;
  BEGIN(event_wait, event)
  sim_event *e = sim_event_find(s, device, event, "event_wait");
  status = e ? sim_wait_host_while(s, e) : ESPER_DEVICE_ERROR;
  END(event_wait, event);
}

static const char *driver_last_error(void *self)
{
  (void)self;
  return sim_last_error();
}

/* ---- settings ---------------------------------------------------------- */

void sim_count_alive(sim *s, int device, sim_alive *alive)
{
  sim_enter(s);
  *alive = s->devices[device].alive;
  sim_leave(s);
}

void sim_set_capacity(sim *s, int device, size_t bytes)
{
  sim_enter(s);
  s->devices[device].capacity = bytes;
  sim_leave(s);
}

void sim_set_caches(sim *s, int device, size_t bytes)
{
  sim_enter(s);
  s->devices[device].caches = bytes;
  sim_leave(s);
}

void sim_allow_loss(sim *s, int allowed)
{
  sim_enter(s);
  s->may_lose = allowed;
  sim_leave(s);
}

void sim_set_reach(sim *s, int reach)
{
  sim_enter(s);
  s->unreachable = !reach;
  sim_leave(s);
}

void sim_set_sharing(sim *s, int able)
{
  sim_enter(s);
  s->keeps = !able;
  sim_leave(s);
}

int sim_may_access(sim *s, int device, const void *address, size_t size)
{
  sim_enter(s);
  int may = sim_closed_to(s, device, (uintptr_t)address, size) == 0;
  sim_leave(s);
  return may;
}

int sim_would_fault(sim *s, const void *address, size_t size)
{
  sim_enter(s);
  int would = sim_lacks_pages(s, (uintptr_t)address, size);
  sim_leave(s);
  return would;
}

/* ---- lifetime ---------------------------------------------------------- */

sim *sim_create(const sim_options *options)
{
  sim *s = calloc(1, sizeof *s);
  if (!s)
    return NULL;
  if (options)
    s->options = *options;
  sim_options *o = &s->options;
  if (o->devices == 0)
    o->devices = 1;
  if (o->capacity == 0)
    o->capacity = (size_t)16 << 30;
  if (o->page_granularity == 0)
    o->page_granularity = (size_t)2 << 20;
  s->devices = o->devices > 0 ? calloc((size_t)o->devices, sizeof *s->devices) : NULL;
  if (o->oracle)
    s->owners = calloc(SIM_OWNERS, sizeof *s->owners);
  if (!s->devices || (o->oracle && !s->owners) || o->page_granularity % 4096 || o->devices > 64 ||
      pthread_mutex_init(&s->lock, NULL)) {
    free(s->devices);
    free(s->owners);
    free(s);
    return NULL;
  }
  s->random = o->seed;
  s->memory.file = -1;
  for (int d = 0; d < o->devices; d++)
    s->devices[d].capacity = o->capacity;
  s->next_capture_id = 1;
  sim_calls_init(s);
  sim_streams_init(s);
  s->driver = (esper_driver){
      .name = "sim",
      .self = s,
#define FUNCTION(name) .name = name,
      SIM_CALLS(FUNCTION)
#undef FUNCTION
          .last_error = driver_last_error,
  };
  return s;
}

void sim_destroy(sim *s)
{
  if (!s)
    return;
  sim_capture_destroy_all(s);
  sim_queue_destroy(s);
  sim_events_destroy(s);
  sim_streams_destroy(s);
  sim_memory_destroy(s);
  sim_contents_destroy(s);
  sim_oracle_destroy(s);
  sim_calls_destroy(s);
  free(s->devices);
  pthread_mutex_destroy(&s->lock);
  free(s);
}

const esper_driver *sim_driver(sim *s)
{
  return &s->driver;
}
