/* Rule 4: obligations belong to bytes. */
#include "episode.h"

static block take_from(esper_pool *pool, size_t size)
{
  block b = {.size = size, .owner = R, .writer = R};
  void *at;
  CHECK_OK(esper_malloc_from(p.core, pool, size, p.streams[R], &at));
  machine_owner_begin(at, size, handle(R));
  b.at = at;
  return b;
}

static void restore(esper_checkpoint *checkpoint, const void *live)
{
  esper_checkpoint_delta delta;
  CHECK_OK(esper_checkpoint_restore(p.core, checkpoint, &delta));
  CHECK_EQ(delta.live_count, 1);
  CHECK(delta.live[0] == live);
  CHECK_OK(esper_free(p.core, (void *)live));
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
}

/* S reads one block; the checkpoint cuts it in two. */
static void cut_by_a_checkpoint(int front)
{
  esper_pool *pool;
  esper_checkpoint *checkpoint;
  begin(20 * MIB);
  CHECK_OK(esper_pool_create(p.core, 0, POOL, 0, &pool));
  block b[] = {take_from(pool, 9 * MIB), take_from(pool, 9 * MIB)};
  give(&b[front]);
  CHECK_OK(esper_checkpoint_take(p.core, 0, POOL, 0, &checkpoint));
  void *live = give(&b[!front]);
  block whole = take_from(pool, 20 * MIB);
  write_block(&whole);
  read_and_mark(&whole, S, LATE);
  give(&whole);
  restore(checkpoint, live);
  for (int i = 0; i < 2; i++) {
    b[i] = take_from(pool, 9 * MIB);
    write_block(&b[i]);
  }
  pool_release(1);
  END(&b[0], &b[1]);
}

TEST(rule_4a_both_parts_of_a_cut_block_owe_what_it_owed)
{
  cut_by_a_checkpoint(0);
  cut_by_a_checkpoint(1);
}

/* S reads one block and T the other; the checkpoint makes them one again. */
static void joined_by_a_checkpoint(int late)
{
  esper_pool *pool;
  esper_checkpoint *checkpoint;
  begin(20 * MIB);
  CHECK_OK(esper_pool_create(p.core, 0, POOL, 0, &pool));
  block whole = take_from(pool, 20 * MIB);
  CHECK_OK(esper_checkpoint_take(p.core, 0, POOL, 0, &checkpoint));
  void *live = give(&whole);
  block b[] = {take_from(pool, 9 * MIB), take_from(pool, 9 * MIB)};
  for (int i = 0; i < 2; i++) {
    write_block(&b[i]);
    read_and_mark(&b[i], i ? T : S, i == late ? LATE : 0);
  }
  give(&b[0]);
  give(&b[1]);
  restore(checkpoint, live);
  whole = take_from(pool, 20 * MIB);
  write_block(&whole);
  pool_release(1);
  END(&whole);
}

TEST(rule_4b_a_merged_block_owes_what_both_owed)
{
  joined_by_a_checkpoint(0);
  joined_by_a_checkpoint(1);
}

TEST(rule_4c_a_merged_block_has_the_later_stamp)
{
  begin(20 * MIB + 2 * MIB);
  block a = take(9 * MIB, R), b = take(9 * MIB, R);
  void *at = give(&a);
  CHECK_OK(esper_empty_cache(p.core, 0, NULL)); /* waits for an event that covers that free */
  write_late(&b);
  give(&b);
  a = take_written(18 * MIB, O);
  CHECK_SIM(a.at == at);
  END(&a);
}

TEST(rule_4d_a_lent_block_is_in_use_until_its_borrower_is_done)
{
  for (int third = 0; third < 2; third++) {
    begin(20 * MIB);
    block a = take_written(9 * MIB, R), b = take_written(9 * MIB, R);
    void *at = give(&a);
    machine_sync(handle(R));
    a = take(9 * MIB, T); /* b keeps the segment R's */
    CHECK(a.at == at);
    write_late(&a);
    give(&a);
    a = take_written(9 * MIB, third ? O : R);
    CHECK(a.at == at);
    END(&a, &b);
  }
}

TEST(rule_4e_another_stream_gets_memory_that_has_completed)
{
  begin(X);
  block x = take(X, S);
  write_late(&x);
  give(&x);
  x = first_on_T(X);
  END(&x);
}

/* R is captured, so nobody can wait for what it did. Freeing memory may wait for the device, so S
 * is looked at before. */
static void give_back_early(void)
{
  block x = take_written(X, R), y = take_written(Y, R);
  machine_sync(handle(R));
  read_and_mark(&x, S, 8 * LATE);
  give(&x);
  give(&y); /* owner order is as good as a use */
  capture_begin(R);
  bool still_read = machine_is_busy(handle(S));
  CHECK_OK(esper_empty_cache(p.core, 0, NULL));
  CHECK(!still_read || reserved_now() >= X);
  CHECK_SIM(reserved_now() == X + Y);
  capture_end(R);
  CHECK_OK(esper_empty_cache(p.core, 0, NULL));
  CHECK_SIM(reserved_now() == 0);
  END();
}

TEST(rule_4f_memory_that_is_still_read_is_not_given_back)
{
  begin(64 * MIB);
  give_back_early();
}

/* S reads what was cut, or joined, by the checkpoint: its bytes keep what they owe. */
TEST(rule_4h_restoring_a_checkpoint_clears_nothing)
{
  cut_by_a_checkpoint(0);
  joined_by_a_checkpoint(0);
}

TEST(rule_4i_pages_that_are_still_read_are_not_unmapped)
{
  begin_mapped(64 * MIB);
  give_back_early();
}

/* Pages of 20 MiB of one stream, every other one of which is written late and then free. */
static void scatter(block b[4], int owner, size_t bytes)
{
  begin_mapped(bytes);
  for (int i = 0; i < 4; i++)
    b[i] = take_written(20 * MIB, owner);
  write_late(&b[0]);
  write_late(&b[2]);
  give(&b[0]);
  give(&b[2]);
}

TEST(rule_4j_another_stream_gets_pages_that_have_completed)
{
  block b[4];
  scatter(b, S, 80 * MIB);
  b[0] = first_on_T(40 * MIB);
  END(&b[0], &b[1], &b[3]);
}

/* R takes a part of its pages at another address, T the rest. */
TEST(rule_4k_pages_that_move_owe_what_they_owed)
{
  block b[4];
  scatter(b, R, 80 * MIB);
  b[0] = take_written(22 * MIB, R);
  CHECK_EQ(reserved_now(), 80 * MIB);
  b[2] = take_written(16 * MIB, T);
  END(&b[0], &b[1], &b[2], &b[3]);
}

TEST(rule_4l_a_block_that_is_read_does_not_go_into_the_cache)
{
  begin(X);
  block x = take(X, R);
  give(&x);
  x = take_written(X, R); /* from the cache */
  read_and_mark(&x, S, LATE);
  void *at = give(&x);
  x = take_written(X, R);
  CHECK(x.at == at);
  END(&x);
}

#ifdef MACHINE_SIM
/* ---- a second device, a driver that refuses -------------------------------- */

TEST(rule_4g_a_mark_on_a_stream_of_another_device_is_a_use)
{
  machine_sim_next((sim_options){.devices = 2});
  begin(X);
  sim *s = machine_sim();
  esper_stream far = {sim_stream_create(s, 1), 1, ESPER_STREAM_IMMORTAL};
  block x = take_written(X, R);
  const void *at = x.at;
  sim_stream_wait_stream(s, 1, far.handle, 0, handle(R));
  sim_kernel(s, 1, far.handle, at, X, SIM_READ);
  CHECK_OK(esper_record_use(p.core, &at, 1, far, 0, NULL));
  give(&x);
  x = take_written(X, R);
  CHECK(x.at == at);
  END(&x);
}

/* Where memory comes from and goes back to. */
typedef enum { CLASSIC, MAPPED, OF_A_POOL, OF_A_POOLS_OWN_ALLOCATOR, SOURCES } source;

static esper_status own_obtain(void *context, int device, size_t size, void **address)
{
  const esper_driver *driver = context;
  return driver->memory_alloc(driver->self, device, size, (uintptr_t *)address);
}

static void own_give_back(void *context, int device, void *address, size_t size)
{
  const esper_driver *driver = context;
  (void)size;
  CHECK_OK(driver->memory_free(driver->self, device, (uintptr_t)address));
}

/* X is live; Y is free, and S still reads it. Owner order is over. */
static esper_pool *leave_what_is_read(source from)
{
  esper_pool *pool = NULL;
  esper_source own = {own_obtain, own_give_back, NULL, (void *)sim_driver(machine_sim())};
  if (from >= OF_A_POOL)
    CHECK_OK(esper_pool_create(p.core, 0, POOL, 0, &pool));
  if (from == OF_A_POOLS_OWN_ALLOCATOR)
    CHECK_OK(esper_pool_set_source(p.core, 0, POOL, 0, &own));
  block b[2];
  for (int i = 0; i < 2; i++)
    b[i] = pool ? take_from(pool, i ? Y : X) : take(i ? Y : X, R);
  write_block(&b[1]);
  read_and_mark(&b[1], S, 0);
  give(&b[1]);
  record_something(R, O);
  drain_both(O, R);
  if (pool)
    pool_release(1);
  return pool;
}

/* Both streams are captured, so nobody can wait for what they do. */
static void no_source_gets_back_what_is_read(source from)
{
  if (from == MAPPED)
    begin_mapped(64 * MIB);
  else
    begin(64 * MIB);
  esper_pool *pool = leave_what_is_read(from);
  capture_begin(R);
  capture_begin(S);
  CHECK_OK(esper_empty_cache(p.core, 0, pool));
  capture_end(R);
  capture_end(S);
  CHECK(machine_is_busy(handle(S)));
  CHECK_OK(esper_empty_cache(p.core, 0, pool)); /* waits */
  CHECK(!machine_is_busy(handle(S)));
  END();
}

/* The host cannot wait, and more is wanted than there is without Y. */
static void no_source_gets_back_what_is_read_when_memory_is_short(source from)
{
  void *at;
  begin(X + Y + 2 * MIB + 4 * MIB);
  leave_what_is_read(from);
  sim *s = machine_sim();
  sim_fail_calls_from(s, SIM_CALL_event_wait, 1, ESPER_DEVICE_ERROR);
  sim_fail_calls_from(s, SIM_CALL_device_synchronize, 1, ESPER_DEVICE_ERROR);
  CHECK(esper_malloc(p.core, Y + 4 * MIB, p.streams[T], &at) != ESPER_OK);
  CHECK(sim_faults(s) > 0);
  sim_fail_call(s, SIM_CALL_event_wait, 0, ESPER_OK);
  sim_fail_call(s, SIM_CALL_device_synchronize, 0, ESPER_OK);
  block y = take_written(Y + 4 * MIB, T); /* Y was waited for, and given back */
  END(&y);
}

TEST(rule_4f_no_allocator_gets_back_what_is_read)
{
  for (source from = 0; from < SOURCES; from++)
    no_source_gets_back_what_is_read(from);
}

TEST(rule_4f_no_allocator_gets_back_what_is_read_when_memory_is_short)
{
  for (source from = 0; from < SOURCES; from++)
    if (from != MAPPED)
      no_source_gets_back_what_is_read_when_memory_is_short(from);
}

/* ... nor where they were before they moved. */
TEST(rule_4i_stale_pages_are_unmapped_when_nobody_uses_them)
{
  block b[4];
  scatter(b, R, 256 * MIB);
  take_written(40 * MIB, R);
  take_written(10 * MIB, R);
  CHECK_EQ(sim_calls(machine_sim(), SIM_CALL_page_unmap), 0);
  machine_sync(handle(R));
  take_written(10 * MIB, R);
  CHECK_EQ(sim_calls(machine_sim(), SIM_CALL_page_unmap), 2);
  END();
}

#endif
