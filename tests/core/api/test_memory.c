/* The public functions that allocate, mark and free memory, and look at it. */
#include "core/base/types.h"
#include "one_world.h"

BEGIN(WHEN_TOLD, .devices = 2)

/* ---- arguments ------------------------------------------------------------------ */

SCENE(devices_that_are_not_there_are_refused)
{
  void *live = world_malloc(&w, 512, r), *event = sim_event_create(w.s, 0), *p;
  const void *marked = live;
  for (int device = -2; device < 8; device += 4) {
    esper_stream stream = {NULL, device, 0};
    p = &w;
    CHECK_STATUS(esper_malloc(w.core, 512, stream, &p), ESPER_INVALID);
    CHECK(!p);
    CHECK(strstr(esper_last_error(), "no device"));
    CHECK_STATUS(esper_record_use(w.core, &marked, 1, stream, 0, NULL), ESPER_INVALID);
    CHECK_STATUS(esper_record_use_event(w.core, &marked, 1, event, device, NULL), ESPER_INVALID);
    CHECK_STATUS(esper_record_stream(w.core, live, stream), ESPER_INVALID);
    CHECK_STATUS(esper_empty_cache(w.core, device, NULL), ESPER_INVALID);
    CHECK_STATUS(esper_open_shared(w.core, device, NULL, 0, &p), ESPER_INVALID);
    esper_retire(w.core, device);
  }
  CHECK_EQ(world_counters(&w, 0).uses_pending, 0);
  sim_event_destroy(w.s, 0, event);
}

SCENE(flags_that_are_none_are_refused)
{
  const void *marked = world_malloc(&w, 512, r);
  for (unsigned flags = 2; flags < 8; flags++) {
    CHECK_STATUS(esper_record_use(w.core, &marked, 1, s, flags, NULL), ESPER_INVALID);
    CHECK(strstr(esper_last_error(), "flags of a use are 0x"));
  }
  CHECK_EQ(world_counters(&w, 0).uses_pending, 0);
}

SCENE(addresses_outside_live_blocks_are_refused)
{
  void *p = world_malloc(&w, 12 * MIB, r), *base;
  size_t size;
  esper_block_info info;
  world_free(&w, p);
  const void *bad[] = {&w, p, (char *)p + 5, NULL};
  for (int i = 0; i < 4; i++) {
    memset(&info, 1, sizeof info);
    CHECK_STATUS(esper_find_block(w.core, bad[i], &info), ESPER_INVALID);
    CHECK(!info.address && !info.size && !info.live);
    CHECK_STATUS(esper_find_base(w.core, bad[i], &base, &size), ESPER_INVALID);
    CHECK_STATUS(esper_record_stream(w.core, bad[i], s), ESPER_INVALID);
    CHECK_STATUS(esper_free_after_all(w.core, (void *)bad[i]), ESPER_INVALID);
    CHECK_STATUS(esper_pin(w.core, bad[i], NULL), ESPER_INVALID);
  }
  CHECK_EQ(world_counters(&w, 0).uses_pending, 0);
}

SCENE(no_bytes_are_no_memory)
{
  esper_pool *pool = world_pool(&w, 0, 7, 0);
  for (int warm = 0; warm < 2; warm++) {
    void *p = &w, *q = &w;
    CHECK_OK(esper_malloc(w.core, 0, r, &p));
    CHECK_OK(esper_malloc_from(w.core, pool, 0, r, &q));
    CHECK(!p && !q);
    CHECK_EQ(world_stats(&w, 0).allocation[ESPER_ALL].allocated, warm);
    if (!warm)
      world_malloc(&w, 512, r);
  }
}

/* ---- looking at memory ----------------------------------------------------------- */

SCENE(the_base_of_a_block_is_its_classic_segment)
{
  char *first = world_malloc(&w, 6 * MIB, r), *p = world_malloc(&w, 6 * MIB, r);
  void *base;
  size_t size;
  CHECK(p == first + 6 * MIB);
  world_free(&w, first); /* free memory belongs to it as well */
  CHECK_OK(esper_find_base(w.core, p + 5, &base, &size));
  CHECK(base == first);
  CHECK_EQ(size, 20 * MIB);
}
