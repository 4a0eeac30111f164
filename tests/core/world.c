#include "world.h"

#include "core/base/core.h"
#include "core/order/device.h"
#include "core/order/record.h"

static void note_failure(void *context, const char *report)
{
  world *w = context;
  if (w->failures++ == 0)
    snprintf(w->failure, sizeof w->failure, "%s", report);
}

/* A failure of the simulation is a failed check, which names the test. */
static void fail(void *context, const char *report)
{
  (void)context;
  check_failed("simulated device", 0, "%s", report);
}

void world_begin_with(world *w, const sim_options *options, const esper_config *config)
{
  /* Many tests are about memory that is pending, so the host is not held back. Segments are set
   * explicitly, so that created pools have mapped ones, too. */
  esper_config never_held_back = {.allowance = ESPER_ALLOWANCE_OFF,
                                  .segments = options->virtual_memory ? ESPER_SEGMENTS_MAPPED
                                                                      : ESPER_SEGMENTS_AUTO};
  if (!config)
    config = &never_held_back;
  memset(w, 0, sizeof *w);
  w->s = sim_create(options);
  CHECK(w->s);
  sim_on_failure(w->s, fail, NULL);
  CHECK_OK(esper_core_create(sim_driver(w->s), config, &w->core));
  for (int i = 0; i < WORLD_STREAMS; i++)
    w->stream[i] = world_stream(w, 0);
}

void world_begin(world *w)
{
  sim_options options = {WHEN_TOLD};
  world_begin_with(w, &options, NULL);
}

void world_set_allowance(world *w, size_t bytes)
{
  esper_config config;
  esper_get_config(w->core, &config);
  config.allowance = bytes;
  CHECK_OK(esper_configure(w->core, &config));
}

static void end_owners(world *w)
{
  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(w->core, -1, &snapshot));
  for (size_t i = 0; i < snapshot.block_count; i++)
    if (snapshot.blocks[i].state == ESPER_BLOCK_ALLOCATED)
      world_free(w, (void *)snapshot.blocks[i].address);
  esper_snapshot_free(&snapshot);
}

void world_end(world *w)
{
  end_owners(w);
  for (int d = 0; d < esper_device_count(w->core); d++)
    CHECK_OK(sim_device_synchronize(w->s, d));
  world_check(w);
  int failed = 0;
  for (int d = 0; d < esper_device_count(w->core); d++)
    failed |= world_has_failed(w, d);
  esper_core_destroy(w->core);
  const esper_driver *driver = sim_driver(w->s);
  int devices;
  CHECK_OK(driver->device_count(driver->self, &devices));
  for (int d = 0; d < devices && !failed; d++) {
    sim_alive alive = world_alive(w, d);
    CHECK_EQ(alive.allocations, 0);
    CHECK_EQ(alive.events, 0);
    CHECK_EQ(alive.streams, 0);
    CHECK_EQ(alive.pages + alive.ranges + alive.mappings + alive.names, 0);
    CHECK_EQ(alive.bytes, 0);
    CHECK_EQ(alive.host_bytes, 0);
  }
  sim_destroy(w->s);
}

void world_note_failures(world *w)
{
  sim_on_failure(w->s, note_failure, w);
}

esper_stream world_stream(world *w, int device)
{
  return (esper_stream){sim_stream_create(w->s, device), device, ESPER_STREAM_IMMORTAL};
}

esper_stream world_mortal(world *w, int device)
{
  return (esper_stream){sim_stream_create(w->s, device), device, 0};
}

void world_destroy_stream(world *w, esper_stream stream)
{
  sim_stream_destroy(w->s, stream.device, stream.handle);
}

void *world_malloc(world *w, size_t size, esper_stream stream)
{
  void *ptr;
  CHECK_OK(esper_malloc(w->core, size, stream, &ptr));
  CHECK(ptr);
  sim_owner_begin(w->s, ptr, world_size(w, ptr), stream.device, stream.handle);
  return ptr;
}

void *world_malloc_from(world *w, esper_pool *pool, size_t size, esper_stream stream)
{
  void *ptr;
  CHECK_OK(esper_malloc_from(w->core, pool, size, stream, &ptr));
  sim_owner_begin(w->s, ptr, world_size(w, ptr), stream.device, stream.handle);
  return ptr;
}

void world_free(world *w, void *ptr)
{
  sim_owner_end(w->s, ptr);
  CHECK_OK(esper_free(w->core, ptr));
}

void world_kernel(world *w, esper_stream stream, const void *ptr)
{
  sim_kernel(w->s, stream.device, stream.handle, ptr, world_size(w, ptr), SIM_READ | SIM_WRITE);
}

void world_wait(world *w, esper_stream waiter, esper_stream other)
{
  sim_stream_wait_stream(w->s, waiter.device, waiter.handle, other.device, other.handle);
}

void world_read_on(world *w, esper_stream reader, const void *ptr, esper_stream owner)
{
  world_wait(w, reader, owner);
  sim_kernel(w->s, reader.device, reader.handle, ptr, world_size(w, ptr), SIM_READ);
}

void world_use(world *w, const void *ptr, esper_stream stream, unsigned flags)
{
  size_t marked;
  CHECK_OK(esper_record_use(w->core, &ptr, 1, stream, flags, &marked));
  CHECK_EQ(marked, 1);
}

void world_read_marked(world *w, esper_stream reader, const void *ptr, esper_stream owner)
{
  world_read_on(w, reader, ptr, owner);
  world_use(w, ptr, reader, 0);
}

void world_record_stream(world *w, const void *ptr, esper_stream stream)
{
  CHECK_OK(esper_record_stream(w->core, ptr, stream));
}

esper_pool *world_pool(world *w, int device, uint64_t id, uint64_t second_id)
{
  esper_pool *pool;
  CHECK_OK(esper_pool_create(w->core, device, id, second_id, &pool));
  return pool;
}

int world_any_stream(void *context, void *stream)
{
  (void)context, (void)stream;
  return 1;
}

int world_is_captured(void *w, void *stream)
{
  uint64_t capture;
  const esper_driver *driver = sim_driver(((world *)w)->s);
  CHECK_OK(driver->stream_capture(driver->self, 0, stream, &capture));
  return capture != 0;
}

void world_run(world *w, esper_stream stream)
{
  sim_run_stream(w->s, stream.device, stream.handle, SIZE_MAX);
}

size_t world_size(world *w, const void *ptr)
{
  esper_block_info info;
  CHECK_OK(esper_find_block(w->core, ptr, &info));
  return info.size;
}

sim_alive world_alive(world *w, int device)
{
  sim_alive alive;
  sim_count_alive(w->s, device, &alive);
  return alive;
}

void world_note_all(world *w)
{
  record_drop(stream_probe(w->core->devices[0].all_streams, UINT64_MAX));
  esper_retire(w->core, 0);
}

esper_stats world_stats(world *w, int device)
{
  esper_stats stats;
  CHECK_OK(esper_get_stats(w->core, device, &stats));
  return stats;
}

int world_has_failed(world *w, int device)
{
  return atomic_load(&w->core->devices[device].failed);
}

esper_counters world_counters(world *w, int device)
{
  esper_counters counters;
  CHECK_OK(esper_get_counters(w->core, device, &counters));
  return counters;
}

static void hear(void *context, const esper_trace_entry *entry)
{
  told_t *to = context;
  CHECK(to->count < sizeof to->entries / sizeof *to->entries);
  to->entries[to->count++] = *entry;
}

void world_listen(world *w, told_t *to)
{
  if (to)
    to->count = 0;
  esper_trace_watch(w->core, to ? hear : NULL, to);
}

static void check_device(world *w, int device)
{
  esper_stats stats = world_stats(w, device);
  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(w->core, device, &snapshot));
  size_t reserved = 0, live = 0, live_blocks = 0, requested = 0;
  for (size_t i = 0; i < snapshot.segment_count; i++) {
    const esper_segment_entry *segment = &snapshot.segments[i];
    uintptr_t at = segment->address;
    reserved += segment->size - segment->asleep;
    for (size_t k = 0; k < segment->block_count; k++) {
      const esper_block_entry *b = &snapshot.blocks[segment->first_block + k];
      CHECK_EQ(b->address, at); /* blocks tile their segment */
      at += b->size;
      if (b->state != ESPER_BLOCK_ALLOCATED)
        continue;
      live += b->size;
      live_blocks++;
      requested += b->requested;
    }
    CHECK_EQ(at, segment->address + segment->size);
  }
  CHECK_EQ(stats.reserved_bytes[ESPER_ALL].current, reserved);
  CHECK_EQ(stats.segment[ESPER_ALL].current, snapshot.segment_count);
  CHECK_EQ(stats.allocated_bytes[ESPER_ALL].current, live);
  CHECK_EQ(stats.allocation[ESPER_ALL].current, live_blocks);
  CHECK(stats.requested_bytes[ESPER_ALL].current >= (int64_t)requested);
  CHECK(stats.active_bytes[ESPER_ALL].current >= (int64_t)live);
  CHECK(stats.active_bytes[ESPER_ALL].peak >= stats.active_bytes[ESPER_ALL].current);
  esper_snapshot_free(&snapshot);
  if (!world_has_failed(w, device)) /* else the driver did not take back what it was offered */
    CHECK_EQ(world_alive(w, device).bytes, reserved);
}

void world_check(world *w)
{
  CHECK(esper_core_is_valid(w->core));
  for (int d = 0; d < esper_device_count(w->core); d++)
    check_device(w, d);
}
