/* Pages that move to another heap, or within one. */
#include "pages_world.h"

SCENE(scattered_pages_serve_a_large_request)
{
  comb(20, 8, r);
  CHECK_EQ(reserved_mib(), 160);
  void *p = used(80, r);
  CHECK_EQ(reserved_mib(), 160);
  CHECK_EQ(calls(SIM_CALL_page_create), 8);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 4);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].peak, 160 * MIB);
  CHECK_STATUS(esper_free(w.core, pieces[0]), ESPER_INVALID); /* a hole */
  world_free(&w, p);
}

SCENE(the_trace_shows_pages_that_move)
{
  comb(20, 4, r);
  static told_t told;
  size_t unmapped = 0, mapped = 0;
  world_listen(&w, &told);
  void *p = get(40, r);
  const esper_trace_entry *entries = told.entries;
  for (size_t i = 0; i < told.count; i++) {
    if (entries[i].action == ESPER_TRACE_SEGMENT_UNMAP) {
      CHECK_EQ(mapped, 0); /* so that sums never pass the peak */
      CHECK_EQ(entries[i].size, 20 * MIB);
      unmapped++;
    } else if (entries[i].action == ESPER_TRACE_SEGMENT_MAP) {
      CHECK(entries[i].address == (uintptr_t)p);
      CHECK_EQ(entries[i].size, 40 * MIB);
      mapped++;
    }
  }
  CHECK_EQ(unmapped, 2);
  CHECK_EQ(mapped, 1);
}

SCENE(what_is_missing_besides_is_new)
{
  comb(20, 4, r);
  get(70, r);
  CHECK_EQ(reserved_mib(), 110);
}

SCENE(pages_of_pinned_segments_stay)
{
  comb(20, 4, r);
  first_segment()->pinned = true;
  get(40, r);
  CHECK_EQ(reserved_mib(), 120);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  first_segment()->pinned = false;
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved_mib(), 80);
}

SCENE(pages_of_other_pools_stay)
{
  esper_pool *pool = world_pool(&w, 0, 3, 1);
  void *p[4];
  for (int i = 0; i < 4; i++)
    p[i] = world_malloc_from(&w, pool, 20 * MIB, r);
  world_free(&w, p[0]);
  world_free(&w, p[2]);
  get(40, r);
  CHECK_EQ(reserved_mib(), 120);
  void *q = world_malloc_from(&w, pool, 40 * MIB, r); /* nor do they move within it */
  CHECK_EQ(reserved_mib(), 160);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  world_free(&w, p[1]);
  world_free(&w, p[3]);
  world_free(&w, q);
  CHECK_OK(esper_pool_release(w.core, 0, 3, 1));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved_mib(), 40);
}

SCENE(a_page_that_cannot_be_mapped_goes_home)
{
  comb(20, 8, r);
  sim_fail_call(w.s, SIM_CALL_page_map, 2, ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_malloc(80 * MIB, r), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved_mib(), 160);
  world_check(&w);
  get(80, r);
  CHECK_EQ(reserved_mib(), 160);
}
