/* The report of pending gates, and the traits of streams. */
#include "core/base/types.h"
#include "world.h"
#include "core/blocks/heap.h"
#include "core/order/wait_log.h"

static world w;
static esper_stream r, s, t;
static esper_gate_entry *gates;
static size_t count;

static void begin_with(sim_options options)
{
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
  t = w.stream[2];
}

static void begin(void)
{
  begin_with((sim_options){.oracle = SIM_ORACLE_KNOWN, .completion = SIM_WHEN_TOLD});
}

static void end(void)
{
  free(gates);
  gates = NULL;
  world_end(&w);
}

static void read_gates(int device)
{
  free(gates);
  CHECK_OK(esper_gates_copy(w.core, device, &gates, &count));
}

/* A block of `owner` that `reader` reads, free; then it is taken again. */
static void *gate_once(size_t size, esper_stream owner, esper_stream reader)
{
  void *p = world_malloc(&w, size, owner);
  world_kernel(&w, owner, p);
  world_read_on(&w, reader, p, owner);
  world_use(&w, p, reader, 0);
  world_free(&w, p);
  CHECK(world_malloc(&w, size, owner) == p);
  return p;
}

TEST(who_waits_for_whom)
{
  begin();
  read_gates(0);
  CHECK_EQ(count, 0);
  gate_once(12 * MIB, r, s);
  gate_once(14 * MIB, t, s);
  read_gates(0);
  CHECK_EQ(count, 2);
  CHECK(gates[0].waiting == r.handle && gates[1].waiting == t.handle);
  CHECK(gates[0].stream == s.handle && gates[1].stream == s.handle);
  CHECK_EQ(gates[0].number, 1);
  CHECK_EQ(gates[1].number, 2);
  CHECK_EQ(gates[0].size, 12 * MIB);
  CHECK_EQ(gates[1].size, 14 * MIB);
  CHECK(gates[0].device == 0 && gates[0].stream_device == 0);
  CHECK(gates[0].issued_us > INT64_C(1500000000000000));
  CHECK(gates[0].issued_us <= gates[1].issued_us);
  world_check(&w);
  sim_run_all(w.s);
  read_gates(0); /* asks what has completed */
  CHECK_EQ(count, 0);
  end();
}

/* The vector clock made it unnecessary, so nothing waits there. */
TEST(a_wait_that_was_not_issued_is_not_reported)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 14 * MIB, r);
  world_read_on(&w, s, p, r);
  world_read_on(&w, s, q, r);
  world_use(&w, p, s, 0);
  world_use(&w, q, s, 0);
  world_free(&w, p);
  world_free(&w, q);
  CHECK(world_malloc(&w, 14 * MIB, r) == q);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  read_gates(0);
  CHECK_EQ(count, 1);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  end();
}

TEST(a_gate_on_another_devices_stream)
{
  begin_with((sim_options){.oracle = SIM_ORACLE_KNOWN, .devices = 2, .completion = SIM_WHEN_TOLD});
  esper_stream far = world_stream(&w, 1);
  gate_once(12 * MIB, r, far);
  read_gates(0);
  CHECK_EQ(count, 1);
  CHECK(gates[0].device == 0 && gates[0].stream_device == 1);
  CHECK(gates[0].stream == far.handle);
  read_gates(1);
  CHECK_EQ(count, 0);
  free(gates);
  CHECK_STATUS(esper_gates_copy(w.core, 2, &gates, &count), ESPER_INVALID);
  CHECK(!gates);
  end();
}

/* Gates that are over are overwritten first, so one that hangs stays visible. */
TEST(a_gate_that_hangs_outlasts_a_thousand_others)
{
  begin();
  sim_wait_flag(w.s, 0, t.handle, 0);
  gate_once(12 * MIB, r, t);
  for (int i = 0; i < 1000; i++) {
    world_free(&w, gate_once(2 * MIB, w.stream[3], s));
    sim_run_all(w.s);
    esper_retire(w.core, 0);
  }
  read_gates(0);
  CHECK_EQ(count, 1);
  CHECK(gates[0].stream == t.handle && gates[0].waiting == r.handle);
  CHECK(world_counters(&w, 0).gates_issued > WAIT_LOG_ENTRIES);
  sim_raise_flag_now(w.s, 0);
  end();
}

/* If there are more than entries, the newest are kept. */
TEST(the_report_is_bounded)
{
  begin();
  sim_wait_flag(w.s, 0, s.handle, 0);
  for (int i = 0; i < 3 * WAIT_LOG_ENTRIES; i++)
    world_free(&w, gate_once(2 * MIB, w.stream[3], s));
  read_gates(0);
  CHECK_EQ(count, WAIT_LOG_ENTRIES);
  CHECK_EQ(gates[WAIT_LOG_ENTRIES - 1].number, 3 * WAIT_LOG_ENTRIES);
  world_check(&w);
  sim_raise_flag_now(w.s, 0);
  end();
}

TEST(a_report_without_host_memory_says_so)
{
  begin();
  gate_once(12 * MIB, r, s);
  esper_gate_entry *copy = (void *)&w;
  check_limit_malloc(0);
  esper_status status = esper_gates_copy(w.core, 0, &copy, &count);
  check_limit_malloc(-1);
  CHECK_STATUS(status, ESPER_HOST_MEMORY);
  CHECK(!copy && !count);
  end();
}

/* Whether a block may be gated on is looked at when it is asked for. */
TEST(a_trait_that_is_taken_back_bars_nothing)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  CHECK_OK(esper_stream_set_traits(w.core, s, ESPER_TRAIT_RENDEZVOUS));
  world_free(&w, p);
  void *other = world_malloc(&w, 12 * MIB, r);
  CHECK(other != p);
  CHECK_OK(esper_stream_set_traits(w.core, s, 0));
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  world_check(&w);
  end();
}

/* Two uses of a block, of which the one without a gate is over. */
TEST(what_was_barred_is_gated_on_when_that_use_is_over)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r);
  world_read_on(&w, t, p, r);
  world_use(&w, p, t, ESPER_USE_NO_GATE);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  world_run(&w, r);
  world_run(&w, t);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  read_gates(0);
  CHECK_EQ(count, 1);
  CHECK(gates[0].stream == s.handle);
  world_check(&w);
  end();
}

/* What waits for the same event is ready as soon as somebody was gated on it. */
TEST(who_shares_a_mark_is_ready_together)
{
  begin();
  void *p[5];
  for (int i = 0; i < 5; i++)
    p[i] = world_malloc(&w, 2 * MIB, r);
  for (int i = 0; i < 4; i++)
    world_read_on(&w, s, p[i], r);
  CHECK_OK(esper_record_use(w.core, (const void *const *)p, 4, s, 0, NULL));
  for (int i = 0; i < 4; i++)
    world_free(&w, p[i]);
  CHECK(world_malloc(&w, 2 * MIB, r) == p[0]);
  world_check(&w); /* nothing that is ready counts as pending */
  CHECK(world_malloc(&w, 6 * MIB, r) == p[1]);
  read_gates(0);
  CHECK_EQ(count, 1);
  end();
}

/* More streams than a heap knows numbers of. */
TEST(each_of_many_streams_is_heard_of)
{
  enum { STREAMS = INDEXED_STREAMS + 4 };
  begin();
  esper_stream reader[STREAMS];
  void *p[STREAMS];
  for (int i = 0; i < STREAMS; i++) {
    reader[i] = world_stream(&w, 0);
    p[i] = world_malloc(&w, 12 * MIB, r);
  }
  for (int i = 0; i < STREAMS; i++) {
    world_read_on(&w, reader[i], p[i], r);
    world_use(&w, p[i], reader[i], ESPER_USE_NO_GATE);
    world_free(&w, p[i]);
  }
  world_run(&w, r);
  for (int i = STREAMS - 1; i >= 0; i--) {
    world_run(&w, reader[i]);
    CHECK(world_malloc(&w, 12 * MIB, r) == p[i]);
    world_check(&w);
  }
  end();
}

TEST(traits_are_checked_and_can_be_taken_back)
{
  begin();
  CHECK_STATUS(esper_stream_set_traits(w.core, s, 2), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "ESPER_TRAIT_RENDEZVOUS"));
  esper_stream none = {NULL, 7, 0};
  CHECK_STATUS(esper_stream_set_traits(w.core, none, 0), ESPER_INVALID);
  CHECK_OK(esper_stream_set_traits(w.core, s, ESPER_TRAIT_RENDEZVOUS));
  void *p = world_malloc(&w, 12 * MIB, r);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK_OK(esper_stream_set_traits(w.core, s, 0)); /* for earlier marks, too */
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  end();
}
