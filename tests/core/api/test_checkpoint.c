/* What a checkpoint of a pool notes, and which pools have one. */
#include "core/api/checkpoint.h"

#include "checkpoint_world.h"

TEST(two_segments_of_a_checkpoint_have_no_part_in_common)
{
  chain_t chains[2] = {{.size = 512, .count = 1}, {.size = 512, .first = 1, .count = 1}};
  part_t parts[2] = {{.size = 512}, {.size = 512}};
  esper_checkpoint made = {.chains = chains, .chain_count = 2, .parts = parts, .part_count = 2};
  CHECK(checkpoint_is_valid(&made));
  chains[1].first = 0;
  CHECK(!checkpoint_is_valid(&made));
}

SCENE(a_checkpoint_that_does_not_add_up_is_noticed)
{
  get_front();
  get(1000, r);
  esper_checkpoint *checkpoint = take(); /* which is valid */
  checkpoint->parts[0].size += 512;
  CHECK(!checkpoint_is_valid(checkpoint));
  checkpoint->parts[0].size -= 512;
  part_t live = checkpoint->parts[0];
  CHECK(live.live);
  checkpoint->parts[0].requested = live.size + 1;
  CHECK(!checkpoint_is_valid(checkpoint));
  checkpoint->parts[0] = live;
  checkpoint->parts[0].user = NULL;
  CHECK(!checkpoint_is_valid(checkpoint));
  checkpoint->parts[0] = live;
  checkpoint->part_count++;
  CHECK(!checkpoint_is_valid(checkpoint));
  checkpoint->part_count--;
  CHECK(checkpoint_is_valid(checkpoint));
  esper_checkpoint_free(checkpoint);
}

SCENE(without_host_memory_no_checkpoint_is_taken)
{
  get_front();
  esper_checkpoint *none;
  for (long calls = 0; calls < 3; calls++) { /* the checkpoint, its chains, its parts */
    CHECK_STATUS(WITH_MALLOCS(calls, esper_checkpoint_take(w.core, 0, ID, 0, &none)),
                 ESPER_HOST_MEMORY);
    CHECK(!none);
  }
  int same;
  CHECK_STATUS(WITH_MALLOCS(0, esper_pool_live_are(w.core, 0, ID, 0, NULL, 0, &same)),
               ESPER_HOST_MEMORY);
  esper_checkpoint_free(take());
}

SCENE(the_live_set_must_match_exactly)
{
  CHECK(live_are(NULL, 0));
  void *a = get(6 * MIB, r), *b = get(4096, s), *c = world_malloc(&w, 512, r);
  const void *both[] = {b, a}, *one[] = {a}, *foreign[] = {a, b, c},
             *inside[] = {a, (char *)b + 512};
  CHECK(live_are(both, 2));
  CHECK(!live_are(one, 1));
  CHECK(!live_are(NULL, 0));
  CHECK(!live_are(foreign, 3));
  CHECK(!live_are(inside, 2));
  world_free(&w, b);
  CHECK(live_are(one, 1));
  int same;
  CHECK_REFUSED(esper_pool_live_are(w.core, 0, 8, 0, NULL, 0, &same), ESPER_INVALID, "(8, 0)");
  CHECK_STATUS(esper_pool_live_are(w.core, 0, 0, 0, NULL, 0, &same), ESPER_INVALID);
}

SCENE(a_checkpoint_outlives_its_core)
{
  get_front();
  esper_checkpoint *checkpoint = take();
  end();
  begin();
  get_front();
  esper_checkpoint_delta delta;
  CHECK_STATUS(esper_checkpoint_restore(w.core, checkpoint, &delta), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "another allocator"));
  esper_checkpoint_free(checkpoint);
  esper_checkpoint_free(NULL);
}

SCENE(misuse_is_refused_and_changes_nothing)
{
  void *a = get_front();
  esper_checkpoint *checkpoint = take(), *none;
  esper_checkpoint_delta delta;
  CHECK_STATUS(esper_checkpoint_take(w.core, 0, 8, 0, &none), ESPER_INVALID);
  CHECK(!none);
  CHECK_STATUS(esper_checkpoint_take(w.core, 0, 0, 0, &none), ESPER_INVALID);
  CHECK_STATUS(esper_checkpoint_take(w.core, 3, ID, 0, &none), ESPER_INVALID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_is_captured, &w));
  CHECK_REFUSED(esper_checkpoint_restore(w.core, checkpoint, &delta), ESPER_INVALID, "end that");
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  CHECK(live_are((const void *[]){a}, 1));
  esper_checkpoint_free(checkpoint);
}

/* They are given back by empty_cache even while the pool is referred to. */
SCENE_WITH(addresses_that_never_had_memory_are_no_part_of_a_checkpoint,
           begin_with(&(sim_options){WHEN_TOLD, .virtual_memory = 1}))
{
  void *p;
  sim_fail_call(w.s, SIM_CALL_page_create, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc_from(w.core, pool, 30 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(alive().ranges, 1);
  esper_checkpoint *checkpoint = take();
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(alive().ranges, 0);
  void *young = get(2 * MIB, r);
  esper_checkpoint_delta delta = restore(checkpoint, r);
  CHECK_EQ(delta.freed_count, 1);
  CHECK(delta.freed[0] == young);
  CHECK_EQ(delta.live_count, 0);
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
}
