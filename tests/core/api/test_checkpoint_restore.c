/* Checkpoints of a pool are restored, as graph trees do. */
#include "checkpoint_world.h"
#include "esper_sleep.h"

static bool is_among(void *const *pointers, size_t count, const void *p)
{
  for (size_t i = 0; i < count; i++)
    if (pointers[i] == p)
      return true;
  return false;
}

SCENE(what_was_live_is_live_again_at_its_address)
{
  void *a = get(6 * MIB, r), *gap = get(3 * MIB, r), *b = get(5 * MIB, r), *small = get(1000, r);
  world_free(&w, gap);
  esper_checkpoint *checkpoint = take();
  const void *live[] = {a, b, small};
  world_free(&w, a);
  world_free(&w, b);
  world_free(&w, small);
  void *other = get(15 * MIB, r), *young = get(30 * MIB, r);
  CHECK(other == a); /* the pieces had become one */
  esper_checkpoint_delta delta = restore(checkpoint, r);
  CHECK_EQ(delta.freed_count, 2);
  CHECK(is_among(delta.freed, 2, other) && is_among(delta.freed, 2, young));
  CHECK_EQ(delta.live_count, 3);
  for (int i = 0; i < 3; i++)
    CHECK(is_among(delta.live, 3, (void *)live[i]));
  CHECK(live_are(live, 3));
  CHECK_EQ(world_size(&w, a), 6 * MIB);
  CHECK_EQ(world_size(&w, small), 1024);
  CHECK_EQ(world_stats(&w, 0).requested_bytes[ESPER_ALL].current, 11 * MIB + 1000);
  CHECK(get(3 * MIB, r) == gap);    /* free, and as it was */
  CHECK(get(30 * MIB, r) == young); /* free, and kept */
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
}

/* A block that was lent when the checkpoint was taken is lent again. */
SCENE_WITH(a_borrower_is_a_borrower_again,
           begin_with(&(sim_options){WHEN_TOLD, .capacity = 20 * MIB}))
{
  void *a = get(6 * MIB, r);
  get(14 * MIB, r); /* no room beside it */
  world_kernel(&w, r, a);
  world_free(&w, a);
  CHECK_OK(sim_device_synchronize(w.s, 0));
  void *lent = get(6 * MIB, s);
  CHECK(lent == a);
  esper_checkpoint *checkpoint = take();
  world_free(&w, lent);
  CHECK_OK(sim_device_synchronize(w.s, 0));
  esper_retire(w.core, 0);
  CHECK(get(6 * MIB, r) == a);
  esper_checkpoint_delta delta;
  CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
  CHECK_EQ(delta.live_count, 2);
  sim_owner_end(w.s, a);
  free(delta.freed);
  sim_owner_begin(w.s, a, 6 * MIB, 0, s.handle);
  world_kernel(&w, s, a); /* its free must cover this */
  world_free(&w, a);
  CHECK(sim_pending_all(w.s) > 0);
  CHECK(get(6 * MIB, r) == a);
  CHECK_EQ(sim_pending_all(w.s), 0); /* the host has waited */
  esper_checkpoint_free(checkpoint);
}

/* A segment with the same address is not the same segment. */
SCENE(memory_that_is_gone_is_named)
{
  void *a = get(12 * MIB, r);
  esper_checkpoint *checkpoint = take();
  world_free(&w, a);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  pool = world_pool(&w, 0, ID, 0);
  void *b = get(12 * MIB, r);
  esper_checkpoint_delta delta;
  CHECK_REFUSED(esper_checkpoint_restore(w.core, checkpoint, &delta), ESPER_INVALID, "given back");
  CHECK(live_are((const void *[]){b}, 1));
  esper_checkpoint_free(checkpoint);
}

SCENE(without_host_memory_nothing_changes)
{
  void *p[300];
  for (int i = 0; i < 300; i++)
    p[i] = get(6 * MIB, r);
  esper_checkpoint *checkpoint = take();
  for (int i = 0; i < 300; i++)
    world_free(&w, p[i]);
  void *whole = get(20 * MIB, r);
  esper_checkpoint_delta delta;
  for (long calls = 0;; calls++) {
    CHECK(calls < 100);
    esper_status status = WITH_MALLOCS(calls, esper_checkpoint_restore(w.core, checkpoint, &delta));
    if (status == ESPER_OK)
      break;
    CHECK_EQ(status, ESPER_HOST_MEMORY);
    CHECK(!delta.freed);
    CHECK(live_are((const void *[]){whole}, 1));
    world_check(&w);
  }
  CHECK_EQ(delta.live_count, 300);
  sim_owner_end(w.s, whole);
  for (int i = 0; i < 300; i++)
    sim_owner_begin(w.s, p[i], 6 * MIB, 0, r.handle);
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
}

/* Whatever happened in between, the live set comes back, of classic segments and of mapped ones. */
TEST(random_programs_come_back)
{
  enum { LIVE = 40, ROUNDS = 300 };
  for (uint64_t seed = 1; seed <= 6; seed++) {
    begin_with(&(sim_options){.oracle = SIM_ORACLE_KNOWN,
                              .completion = SIM_SEEDED,
                              .seed = seed,
                              .virtual_memory = seed > 3});
    esper_checkpoint *checkpoint = NULL;
    struct {
      void *p;
      esper_stream owner;
    } live[LIVE] = {{0}}, then[LIVE] = {{0}};
    uint64_t x = seed * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < ROUNDS; i++) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      unsigned k = (unsigned)(x >> 33) % LIVE, what = (unsigned)(x >> 53) % 8;
      esper_stream owner = w.stream[(x >> 40) % 3];
      if (live[k].p) {
        esper_stream reader = w.stream[(x >> 45) % WORLD_STREAMS];
        world_read_on(&w, reader, live[k].p, live[k].owner);
        if (what % 2)
          world_use(&w, live[k].p, reader, 0);
        else
          world_record_stream(&w, live[k].p, reader);
        world_free(&w, live[k].p);
        live[k].p = NULL;
      } else {
        live[k].owner = owner;
        live[k].p = get((size_t)((x >> 20) % (9 * MIB)) + 1, owner);
        world_kernel(&w, owner, live[k].p);
      }
      if (i % 50 == 20) {
        esper_checkpoint_free(checkpoint);
        checkpoint = take();
        memcpy(then, live, sizeof then);
      } else if (i % 50 == 49) {
        /* Before a tree records it waits for the device. */
        CHECK_OK(sim_device_synchronize(w.s, 0));
        esper_checkpoint_delta delta;
        CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
        for (size_t d = 0; d < delta.freed_count; d++)
          sim_owner_end(w.s, delta.freed[d]);
        const void *expected[LIVE];
        size_t count = 0;
        memcpy(live, then, sizeof live);
        for (int l = 0; l < LIVE; l++)
          if (live[l].p) {
            expected[count++] = live[l].p;
            sim_owner_begin(w.s, live[l].p, world_size(&w, live[l].p), 0, live[l].owner.handle);
          }
        CHECK_EQ(count, delta.live_count);
        CHECK(live_are(expected, count));
        free(delta.freed);
        world_check(&w);
      }
    }
    esper_checkpoint_free(checkpoint);
    end();
  }
}

SCENE_WITH(memory_that_sleeps_is_not_restored,
           begin_with(&(sim_options){.oracle = SIM_ORACLE_KNOWN, .virtual_memory = 1}))
{
  void *a = get(6 * MIB, r);
  esper_checkpoint *checkpoint = take();
  esper_checkpoint_delta delta;
  CHECK_OK(esper_sleep(w.core, -1, NULL, 0, ESPER_KEEP_HOST, NULL));
  CHECK_STATUS(esper_checkpoint_restore(w.core, checkpoint, &delta), ESPER_ASLEEP);
  CHECK(strstr(esper_last_error(), "wake it first"));
  CHECK(!delta.freed_count && !delta.live_count);
  world_check(&w);
  CHECK_OK(esper_wake(w.core, -1, NULL, 0, NULL));
  delta = restore(checkpoint, r);
  CHECK(delta.live_count == 1 && delta.live[0] == a);
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
}
