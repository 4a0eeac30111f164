/* Snapshots of memory, and who may watch. */

#include "core/base/types.h"
#include "one_world.h"

static esper_snapshot snapshot; /* the last that was taken */

static void begin(void)
{
  esper_snapshot_free(&snapshot);
  begin_on((sim_options){WHEN_TOLD, .devices = 2, .capacity = 64 * MIB}, NULL);
}

static void take(int device)
{
  esper_snapshot_free(&snapshot);
  CHECK_OK(esper_snapshot_take(w.core, device, &snapshot));
}

/* The entry of the block at an address. */
static const esper_block_entry *entry_of(const void *p)
{
  for (size_t i = 0; i < snapshot.block_count; i++)
    if (snapshot.blocks[i].address == (uintptr_t)p)
      return &snapshot.blocks[i];
  CHECK(!"in the snapshot");
  return NULL;
}

/* The kind of the only use of the block there. */
static unsigned kind_of(const void *p)
{
  const esper_block_entry *entry = entry_of(p);
  CHECK_EQ(entry->uses, 1);
  return snapshot.uses[entry->first_use].kind;
}

/* ---- uses --------------------------------------------------------------------------- */

SCENE(uses_tell_their_kind)
{
  enum { PLAIN, AT_FREE, UNTIL_FREE, UNRECORDED, CAPTURED, KINDS };
  void *p[KINDS];
  for (int i = 0; i < KINDS; i++)
    p[i] = world_malloc(&w, 512, i == CAPTURED ? t : r);
  world_use(&w, p[PLAIN], s, 0);
  world_record_stream(&w, p[AT_FREE], s);
  world_use(&w, p[UNTIL_FREE], s, ESPER_USE_UNTIL_FREE);
  sim_fail_call(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
  world_use(&w, p[UNRECORDED], s, 0);
  take(0);
  CHECK_EQ(kind_of(p[PLAIN]), 0);
  CHECK_EQ(kind_of(p[AT_FREE]), ESPER_ENTRY_AT_FREE);
  CHECK_EQ(snapshot.uses[entry_of(p[AT_FREE])->first_use].number, 0); /* none yet */
  CHECK_EQ(kind_of(p[UNTIL_FREE]), ESPER_ENTRY_AT_FREE);
  CHECK(kind_of(p[UNRECORDED]) & ESPER_ENTRY_HELD);
  sim_capture_begin(w.s, 0, t.handle);
  void *inside = world_malloc(&w, 512, t);
  world_wait(&w, s, t);
  world_use(&w, inside, s, 0);
  take(0);
  CHECK_EQ(kind_of(inside), ESPER_ENTRY_CAPTURED);
  world_wait(&w, t, s);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, t.handle));
}

SCENE(what_was_freed_is_pending_and_what_is_over_is_not_shown)
{
  void *p = world_malloc(&w, 12 * MIB - 100, r);
  world_use(&w, p, s, 0);
  world_use(&w, p, w.stream[2], 0);
  world_record_stream(&w, p, w.stream[3]);
  world_free(&w, p);
  take(0);
  CHECK_EQ(entry_of(p)->state, ESPER_BLOCK_PENDING_FREE);
  CHECK_EQ(entry_of(p)->requested, 12 * MIB - 100);
  CHECK_EQ(entry_of(p)->uses, 3);
  CHECK_EQ(snapshot.use_count, 3);
  world_run(&w, w.stream[2]);
  take(0); /* finds out */
  CHECK_EQ(entry_of(p)->uses, 2);
  for (int i = 0; i < 2; i++) {
    const esper_use_entry *use = &snapshot.uses[entry_of(p)->first_use + (size_t)i];
    CHECK(use->stream != w.stream[2].handle && use->number > 0);
  }
  sim_run_all(w.s);
  take(0);
  CHECK_EQ(entry_of(p)->state, ESPER_BLOCK_INACTIVE);
  CHECK_EQ(snapshot.use_count, 0);
}

/* A live block's use goes, too, although its block stays. */
SCENE(a_live_blocks_use_that_is_over_is_not_shown)
{
  void *p = world_malloc(&w, 512, r);
  world_use(&w, p, s, 0);
  sim_run_all(w.s);
  take(0);
  CHECK_EQ(entry_of(p)->state, ESPER_BLOCK_ALLOCATED);
  CHECK_EQ(entry_of(p)->uses, 0);
  CHECK(entry_of(p)->stream == r.handle);
}

SCENE(without_host_memory_there_is_no_snapshot)
{
  world_malloc(&w, 512, r);
  world_malloc(&w, 512, world_stream(&w, 1));
  for (long calls = 0; calls < 6; calls++) { /* three arrays for each device */
    CHECK_STATUS(WITH_MALLOCS(calls, esper_snapshot_take(w.core, -1, &snapshot)),
                 ESPER_HOST_MEMORY);
    CHECK(!snapshot.segments && !snapshot.blocks && !snapshot.uses);
    CHECK_EQ(snapshot.segment_count + snapshot.block_count + snapshot.use_count, 0);
  }
  take(-1);
  CHECK_EQ(snapshot.segment_count, 2);
}
