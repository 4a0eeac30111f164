/* What the watcher is told. */
#include <stdbool.h>

#include "core/base/types.h"
#include "one_world.h"

BEGIN(WHEN_TOLD, .devices = 2, .capacity = 64 * MIB)

static told_t told;

static void check_entry(size_t i, esper_action action, const void *address, size_t size,
                        esper_stream stream)
{
  CHECK(i < told.count);
  CHECK_EQ(told.entries[i].action, action);
  CHECK(told.entries[i].address == (uintptr_t)address);
  CHECK_EQ(told.entries[i].size, size);
  CHECK(told.entries[i].stream == stream.handle);
  CHECK_EQ(told.entries[i].device, stream.device);
  CHECK(told.entries[i].time_us > 1500000000000000); /* since 1970 */
  CHECK(i == 0 || told.entries[i].time_us >= told.entries[i - 1].time_us);
}

SCENE(everything_that_happens_is_told_in_order)
{
  world_listen(&w, &told);
  void *p = world_malloc(&w, 11 * MIB - 5, r);
  read_and_free(p, s);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  CHECK_STATUS(try_malloc(100 * MIB - 5, r), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(told.count, 6);
  check_entry(0, ESPER_TRACE_SEGMENT_ALLOC, p, 12 * MIB, r);
  check_entry(1, ESPER_TRACE_ALLOC, p, 11 * MIB - 5, r);
  check_entry(2, ESPER_TRACE_FREE_REQUESTED, p, 11 * MIB - 5, r);
  check_entry(3, ESPER_TRACE_FREE_COMPLETED, p, 11 * MIB - 5, r);
  check_entry(4, ESPER_TRACE_SEGMENT_FREE, p, 12 * MIB, r);
  check_entry(5, ESPER_TRACE_OOM, (void *)(64 * MIB), 100 * MIB, r);
}

SCENE(entries_name_their_pool)
{
  world_listen(&w, &told);
  void *p = world_malloc_from(&w, world_pool(&w, 0, 7, 9), 12 * MIB, r);
  world_malloc(&w, 512, r);
  world_free(&w, p);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 9));
  CHECK_OK(esper_pool_empty(w.core, 0, 7, 9));
  CHECK_EQ(told.count, 7);
  for (size_t i = 0; i < told.count; i++) {
    bool of_pool = i != 2 && i != 3; /* the small block and its segment */
    CHECK_EQ(told.entries[i].pool[0], of_pool ? 7 : 0);
    CHECK_EQ(told.entries[i].pool[1], of_pool ? 9 : 0);
  }
  CHECK_EQ(told.entries[6].action, ESPER_TRACE_SEGMENT_FREE);
}
