/* A validation step on an environment's stream: a batch is moved to the device, repeated for each
 * configuration on that stream, and freed.
 *
 * The batch's memory would be reused while the repeat still reads it unless the batch carries a
 * use. The oracle must report the step that is written wrong and accept each that is right; see
 * esper_alloc/helpers/validation.py. */
#include "world.h"

static world w;
static esper_stream caller, env; /* the current stream, the environment's */

enum { BATCH = 12, CONFIGS = 2, FUSED = CONFIGS * BATCH }; /* MiB */

/* Room for the batch once: whoever wants as much again gets its memory. */
static void begin(void)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .capacity = (BATCH + FUSED) * MIB};
  world_begin_with(&w, &options, NULL);
  caller = w.stream[0];
  env = w.stream[1];
}

/* What .to(device, non_blocking=True) does on the current stream. */
static void *move_batch(esper_stream current)
{
  void *batch = world_malloc(&w, BATCH * MIB, current);
  world_kernel(&w, current, batch);
  return batch;
}

/* batch.repeat(CONFIGS) on the environment's stream, after the copy. */
static void *repeat(const void *batch)
{
  world_wait(&w, env, caller);
  void *fused = world_malloc(&w, FUSED * MIB, env);
  world_read_on(&w, env, batch, caller);
  world_kernel(&w, env, fused);
  return fused;
}

/* The next batch's memory, while nothing has run yet. */
static void *next_batch(void)
{
  return world_malloc(&w, BATCH * MIB, caller);
}

TEST(a_batch_that_only_its_repetition_protects_is_overwritten)
{
  begin();
  void *batch = move_batch(caller);
  void *fused = repeat(batch);
  world_record_stream(&w, fused, env); /* its own stream: says nothing */
  world_free(&w, batch);
  world_note_failures(&w);
  CHECK(next_batch() == batch);
  CHECK_EQ(w.failures, 1);
  world_end(&w);
}

TEST(a_mark_before_the_repetition_does_not_help)
{
  begin();
  void *batch = move_batch(caller);
  world_wait(&w, env, caller);
  world_use(&w, batch, env, 0);
  repeat(batch);
  world_free(&w, batch);
  world_note_failures(&w);
  CHECK(next_batch() == batch);
  CHECK_EQ(w.failures, 1);
  world_end(&w);
}

TEST(a_batch_marked_after_the_repetition_is_reused_in_order)
{
  begin();
  void *batch = move_batch(caller);
  repeat(batch);
  world_use(&w, batch, env, 0);
  world_free(&w, batch);
  CHECK(next_batch() == batch); /* the host has waited */
  world_end(&w);
}

TEST(record_stream_before_the_repetition_protects_until_the_free)
{
  begin();
  void *batch = move_batch(caller);
  world_record_stream(&w, batch, env);
  repeat(batch);
  world_free(&w, batch);
  CHECK(next_batch() == batch);
  world_end(&w);
}

/* As fused_validation_batch() does with a batch of the host's. */
TEST(a_batch_moved_on_the_environments_stream_needs_no_mark)
{
  begin();
  void *batch = move_batch(env);
  repeat(batch);
  world_free(&w, batch);
  CHECK(next_batch() == batch);
  world_end(&w);
}

/* As it does with a batch that is on the device already. */
TEST(a_batch_that_the_caller_drops_too_is_reused_in_order)
{
  begin();
  void *batch = move_batch(caller);
  void *fused = repeat(batch);
  world_use(&w, batch, env, 0);
  world_free(&w, fused);
  world_free(&w, batch);
  world_run(&w, caller); /* the copy alone: the repetition is still to come */
  CHECK(next_batch() == batch);
  world_end(&w);
}

/* Tensors that are kept until the host has waited for their reader carry no
 * mark, and need none: what looks like the same mistake is none. */
TEST(tensors_kept_until_the_stream_was_synchronised_need_no_mark)
{
  begin();
  void *overrides = move_batch(caller);
  void *fused = repeat(overrides);
  CHECK_OK(sim_stream_synchronize(w.s, env.device, env.handle));
  world_free(&w, overrides);
  world_free(&w, fused);
  CHECK(next_batch() == overrides);
  world_end(&w);
}

/* Kept for as long, but dropped before the wait: the same mistake after all. */
TEST(tensors_dropped_before_the_stream_was_synchronised_do)
{
  begin();
  void *overrides = move_batch(caller);
  repeat(overrides);
  world_run(&w, env);
  world_free(&w, overrides);
  world_note_failures(&w);
  CHECK(next_batch() == overrides);
  CHECK_EQ(w.failures, 1);
  world_end(&w);
}
