/* timed_device.h: a device on which work takes time, to see what waiting for memory costs.
 *
 * Its driver is the simulated device's, but streams, events and the host have clocks. A kernel
 * makes its stream busy; an event has the time at which its stream gets there; a wait makes a
 * stream, or the host, as late as the event. So the time that a program takes is exact, the same in
 * every run, and independent of the machine. */
#ifndef ESPER_TIMED_DEVICE_H
#define ESPER_TIMED_DEVICE_H

#include "world.h"

enum { TIMED_STREAMS = 16 };

/* What the host spends on a call, in microseconds. */
static const double ENQUEUE_US = 4, EVENT_US = 1, QUERY_US = 0.2, PAGE_US = 40, ALLOC_US = 300;
static const double CREATE_US = 14, RELEASE_US = 10, UNMAP_US = 20;

/* What a copy between the host and the device takes for a MiB, in microseconds: 50 GiB/s. */
static const double COPY_US_MIB = 20;

static struct {
  world w;
  const esper_driver *sim;
  esper_driver driver;
  double now; /* the host's clock, in microseconds */
  double busy_until[TIMED_STREAMS];
  void *handle[TIMED_STREAMS];
  int streams;
} timed;

static double *busy_until(void *handle)
{
  for (int i = 0; i < timed.streams; i++)
    if (timed.handle[i] == handle)
      return &timed.busy_until[i];
  CHECK(timed.streams < TIMED_STREAMS);
  timed.handle[timed.streams] = handle;
  return &timed.busy_until[timed.streams++];
}

static double later(double a, double b)
{
  return a > b ? a : b;
}

static double all_busy_until(void)
{
  double last = 0;
  for (int i = 0; i < timed.streams; i++)
    last = later(last, timed.busy_until[i]);
  return last;
}

/* ---- the driver -------------------------------------------------------------- */

static esper_status timed_event_create(void *self, int device, void **event)
{
  (void)self, (void)device;
  double *time = calloc(1, sizeof *time);
  *event = time;
  return time ? ESPER_OK : ESPER_HOST_MEMORY;
}

static esper_status timed_event_destroy(void *self, int device, void *event)
{
  (void)self, (void)device;
  free(event);
  return ESPER_OK;
}

static esper_status timed_event_record(void *self, int device, void *event, void *stream)
{
  (void)self, (void)device;
  timed.now += EVENT_US;
  *(double *)event = later(*busy_until(stream), timed.now);
  return ESPER_OK;
}

static esper_status timed_event_record_all(void *self, int device, void *event)
{
  (void)self, (void)device;
  timed.now += EVENT_US;
  *(double *)event = later(all_busy_until(), timed.now);
  return ESPER_OK;
}

static esper_status timed_event_query(void *self, int device, void *event)
{
  (void)self, (void)device;
  timed.now += QUERY_US;
  return *(double *)event <= timed.now ? ESPER_OK : ESPER_NOT_READY;
}

static esper_status timed_event_synchronize(void *self, int device, void *event)
{
  (void)self, (void)device;
  timed.now = later(timed.now, *(double *)event);
  return ESPER_OK;
}

static esper_status timed_event_wait(void *self, int device, void *event, unsigned microseconds)
{
  (void)self, (void)device;
  double latest = timed.now + microseconds, time = *(double *)event;
  timed.now = later(timed.now, time < latest ? time : latest);
  return time <= timed.now ? ESPER_OK : ESPER_NOT_READY;
}

static esper_status timed_stream_wait(void *self, int device, void *stream, void *event)
{
  (void)self, (void)device;
  timed.now += EVENT_US;
  double *busy = busy_until(stream);
  *busy = later(*busy, *(double *)event);
  return ESPER_OK;
}

static esper_status timed_device_synchronize(void *self, int device)
{
  (void)self, (void)device;
  timed.now = later(timed.now, all_busy_until());
  return ESPER_OK;
}

/* What the simulated device does, after a time. */
#define TAKES(us, name, parameters, ...)               \
  static esper_status timed_##name parameters          \
  {                                                    \
    timed.now += us;                                   \
    return timed.sim->name(self, device, __VA_ARGS__); \
  }
TAKES(ALLOC_US, memory_alloc, (void *self, int device, size_t size, uintptr_t *at), size, at)
TAKES(CREATE_US, page_create, (void *self, int device, size_t size, uint64_t *page), size, page)
TAKES(RELEASE_US, page_release, (void *self, int device, uint64_t page), page)
TAKES(UNMAP_US, page_unmap, (void *self, int device, uintptr_t at, size_t size), at, size)
TAKES(PAGE_US, page_map,
      (void *self, int device, uintptr_t at, size_t size, uint64_t page, const int *peers,
       int count),
      at, size, page, peers, count)

static esper_status timed_copy(void *stream, size_t size)
{
  timed.now += ENQUEUE_US;
  double *busy = busy_until(stream);
  *busy = later(*busy, timed.now) + COPY_US_MIB * (double)size / MIB;
  return ESPER_OK;
}

static esper_status timed_copy_to_host(void *self, int device, void *stream, void *to,
                                       uintptr_t from, size_t size)
{
  (void)self, (void)device, (void)to, (void)from;
  return timed_copy(stream, size);
}

static esper_status timed_copy_to_device(void *self, int device, void *stream, uintptr_t to,
                                         const void *from, size_t size)
{
  (void)self, (void)device, (void)to, (void)from;
  return timed_copy(stream, size);
}

/* ---- the program ------------------------------------------------------------- */

static void timed_begin(size_t capacity, const esper_config *config)
{
  sim_options options = {.capacity = capacity, .virtual_memory = 1};
  memset(&timed, 0, sizeof timed);
  timed.w.s = sim_create(&options);
  CHECK(timed.w.s);
  timed.sim = sim_driver(timed.w.s);
  timed.driver = *timed.sim;
  timed.driver.event_create = timed_event_create;
  timed.driver.event_destroy = timed_event_destroy;
  timed.driver.event_record = timed_event_record;
  timed.driver.event_record_all = timed_event_record_all;
  timed.driver.event_query = timed_event_query;
  timed.driver.event_synchronize = timed_event_synchronize;
  timed.driver.event_wait = timed_event_wait;
  timed.driver.stream_wait = timed_stream_wait;
  timed.driver.device_synchronize = timed_device_synchronize;
  timed.driver.memory_alloc = timed_memory_alloc;
  timed.driver.page_map = timed_page_map;
  timed.driver.page_create = timed_page_create;
  timed.driver.page_release = timed_page_release;
  timed.driver.page_unmap = timed_page_unmap;
  timed.driver.copy_to_host = timed_copy_to_host;
  timed.driver.copy_to_device = timed_copy_to_device;
  CHECK_OK(esper_core_create(&timed.driver, config, &timed.w.core));
  for (int i = 0; i < WORLD_STREAMS; i++)
    timed.w.stream[i] = world_stream(&timed.w, 0);
}

static void timed_end(void)
{
  world_check(&timed.w);
  esper_core_destroy(timed.w.core);
  sim_destroy(timed.w.s);
}

/* Enqueues work that takes `us` microseconds. */
static inline void timed_kernel(esper_stream stream, double us)
{
  timed.now += ENQUEUE_US;
  double *busy = busy_until(stream.handle);
  *busy = later(*busy, timed.now) + us;
}

/* Future work of `waiter` starts when `other` has done what it has now. */
static inline void timed_wait(esper_stream waiter, esper_stream other)
{
  double *busy = busy_until(waiter.handle);
  timed.now += 2 * EVENT_US;
  *busy = later(*busy, *busy_until(other.handle));
}

static inline void timed_host_waits(void)
{
  timed.now = later(timed.now, all_busy_until());
}

/* The owner frees what `reader` used last. */
static inline void timed_mark_free(void *p, esper_stream reader)
{
  world_use(&timed.w, p, reader, 0);
  CHECK_OK(esper_free(timed.w.core, p));
}

#endif
