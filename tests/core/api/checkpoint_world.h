/* checkpoint_world.h: what the tests of checkpoints share: a world with a private pool, whose
 * checkpoints are taken and restored. */
#ifndef ESPER_CHECKPOINT_WORLD_H
#define ESPER_CHECKPOINT_WORLD_H

#include <stdbool.h>

#include "core/api/checkpoint.h"
#include "one_world.h"

__attribute__((unused)) static esper_pool *pool;

enum { ID = 7 };

static inline void begin_with(const sim_options *options)
{
  world_begin_with(&w, options, NULL);
  name_streams();
  pool = world_pool(&w, 0, ID, 0);
}

static inline void begin(void)
{
  begin_with(&(sim_options){WHEN_TOLD});
}

static inline void *get(size_t size, esper_stream stream)
{
  return world_malloc_from(&w, pool, size, stream);
}

/* A segment of 20 MiB whose first 6 MiB are live and the rest free. */
static inline void *get_front(void)
{
  void *a = get(6 * MIB, r), *b = get(6 * MIB, r);
  world_free(&w, b);
  return a;
}

static inline esper_checkpoint *take(void)
{
  esper_checkpoint *checkpoint;
  CHECK_OK(esper_checkpoint_take(w.core, 0, ID, 0, &checkpoint));
  CHECK(checkpoint_is_valid(checkpoint));
  return checkpoint;
}

/* The size of the live block at an address in the snapshot; 0: there is none. */
static inline size_t size_in(const esper_snapshot *snapshot, const void *p)
{
  for (size_t i = 0; i < snapshot->block_count; i++)
    if (snapshot->blocks[i].address == (uintptr_t)p &&
        snapshot->blocks[i].state == ESPER_BLOCK_ALLOCATED)
      return snapshot->blocks[i].size;
  return 0;
}

/* Tells the oracle of the owners that come and go; who stays is the same one. */
static inline esper_checkpoint_delta restore(const esper_checkpoint *checkpoint, esper_stream owner)
{
  esper_snapshot before, after;
  esper_checkpoint_delta delta;
  CHECK_OK(esper_snapshot_take(w.core, 0, &before));
  CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
  CHECK_OK(esper_snapshot_take(w.core, 0, &after));
  for (size_t i = 0; i < delta.freed_count; i++) {
    void *p = delta.freed[i];
    CHECK(size_in(&before, p));
    if (size_in(&after, p) != size_in(&before, p))
      sim_owner_end(w.s, p);
  }
  for (size_t i = 0; i < delta.live_count; i++) {
    void *p = delta.live[i];
    CHECK(size_in(&after, p));
    if (size_in(&after, p) != size_in(&before, p))
      sim_owner_begin(w.s, p, size_in(&after, p), 0, owner.handle);
  }
  esper_snapshot_free(&before);
  esper_snapshot_free(&after);
  world_check(&w);
  return delta;
}

static inline bool live_are(const void *const *pointers, size_t count)
{
  int same;
  CHECK_OK(esper_pool_live_are(w.core, 0, ID, 0, pointers, count, &same));
  return same;
}

/* A capture on r into the pool, as torch.cuda.graph makes it. */
static inline void capture_begin(void)
{
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_is_captured, &w));
  sim_capture_begin(w.s, 0, r.handle);
  sim_capture_group(w.s, 0, r.handle, ID);
}

static inline sim_graph *capture_end(void)
{
  sim_graph *graph = captured(r);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  return graph;
}

#endif
