/* What the happens-before engine finds, and what it says of it. Which accesses are ordered is tried
 * in test_random_order.c. */
#include "audit/audit.h"

#include "check.h"

enum { MAIN = 10, SIDE = 20, THIRD = 30 };
enum { X = 0x10000, Y = 0x20000, SIZE = 4096 };

static audit *a;

static void begin(void)
{
  a = audit_create();
  CHECK(a);
}

static void end(void)
{
  CHECK(audit_is_complete(a));
  audit_destroy(a);
}

static audit_stream on(int handle)
{
  return (audit_stream){0, (uint64_t)handle};
}

static void allocate(uintptr_t address, int stream, uint32_t site)
{
  const audit_stream name = on(stream);
  audit_allocated(a, address, SIZE, &name, site);
}

static void touch_part(uintptr_t address, size_t first, size_t size, int stream, int writes,
                       uint32_t site)
{
  const audit_access access = {.address = address,
                               .bytes = {address + first, size, 0, 0},
                               .stream = on(stream),
                               .writes = writes,
                               .place = {site, 7, 8}};
  audit_accessed(a, &access);
}

static void read_by(uintptr_t address, int stream, uint32_t site)
{
  touch_part(address, 0, SIZE, stream, 0, site);
}

static void write_by(uintptr_t address, int stream, uint32_t site)
{
  touch_part(address, 0, SIZE, stream, 1, site);
}

/* `later` waits for all that `earlier` has. */
static void wait_for(int later, int earlier)
{
  audit_record(a, 1000, on(earlier));
  audit_wait(a, on(later), 1000);
}

static const audit_finding *only(audit_kind kind)
{
  CHECK_EQ(audit_finding_count(a), 1);
  CHECK_EQ(audit_finding_at(a, 0)->kind, kind);
  return audit_finding_at(a, 0);
}

static void check_silent(void)
{
  audit_judge_rest(a);
  CHECK_EQ(audit_finding_count(a), 0);
}

/* ---- frees ----------------------------------------------------------------- */

/* Memory of MAIN is read by SIDE, properly. */
static void allocate_and_read(uintptr_t address)
{
  allocate(address, MAIN, 1);
  wait_for(SIDE, MAIN);
  read_by(address, SIDE, 2);
}

static void begin_read(void)
{
  begin();
  allocate_and_read(X);
}

/* ... and freed at line 3, as in a loop. */
static void read_and_free(uintptr_t address)
{
  allocate_and_read(address);
  audit_freed(a, address, 3);
}

SCENE_WITH(a_free_without_order_is_found_when_memory_is_touched_that_may_be_the_same, begin_read())
{
  audit_freed(a, X, 3);
  write_by(X + SIZE, MAIN, 4); /* other memory, of unknown age */
  CHECK_EQ(audit_finding_count(a), 0);
  allocate(Y, MAIN, 5);
  CHECK_EQ(audit_finding_count(a), 0);
  write_by(Y, MAIN, 6);
  const audit_finding *f = only(AUDIT_FREED_IN_USE);
  CHECK_EQ(f->address, X);
  CHECK_EQ(f->size, SIZE);
  CHECK_EQ(f->allocated, 1);
  CHECK(f->home_is_known && f->home.handle == MAIN);
  CHECK_EQ(f->earlier.place.site, 2);
  CHECK_EQ(f->earlier.place.operation, 7);
  CHECK_EQ(f->earlier.place.tensor, 8);
  CHECK(f->earlier.stream.handle == SIDE && !f->earlier.writes);
  CHECK_EQ(f->freed, 3);
  CHECK(f->has_later && f->later.place.site == 6);
}

/* A loop ends before its last free is ordered, as all others were. */
TEST(the_last_free_of_a_loop_is_like_those_before)
{
  for (int other_line = 0; other_line < 2; other_line++) {
    begin();
    read_and_free(X);
    wait_for(MAIN, SIDE);
    allocate_and_read(X); /* in time */
    audit_freed(a, X, other_line ? 4 : 3);
    if (other_line) {
      audit_judge_rest(a);
      CHECK_EQ(only(AUDIT_FREED_IN_USE)->freed, 4);
    } else {
      check_silent();
    }
    end();
  }
}

SCENE_WITH(a_mark_before_the_last_access_is_named, begin_read())
{
  audit_marked(a, X, on(SIDE), 0, 3);
  read_by(X, SIDE, 4);
  audit_freed(a, X, 5);
  audit_judge_rest(a);
  const audit_finding *f = only(AUDIT_MARKED_EARLY);
  CHECK_EQ(f->marked, 3);
  CHECK_EQ(f->earlier.place.site, 4);
}

SCENE_WITH(memory_that_is_held_for_all_streams_is_safe, begin_read())
{
  audit_held(a, X);
  audit_freed(a, X, 3);
  check_silent();
}

SCENE_WITH(each_of_two_streams_is_named, begin_read())
{
  wait_for(THIRD, MAIN);
  read_by(X, THIRD, 3);
  audit_freed(a, X, 4);
  audit_judge_rest(a);
  CHECK_EQ(audit_finding_count(a), 2);
}

SCENE(equal_findings_count)
{
  for (int i = 0; i < 100; i++) {
    read_and_free(X);
    if (i % 10 == 9)
      audit_judge_rest(a);
  }
  CHECK_EQ(only(AUDIT_FREED_IN_USE)->count, 100);
}

SCENE(memory_from_before_the_audit_has_no_stream)
{
  audit_allocated(a, X, SIZE, NULL, 0);
  read_by(X, MAIN, 1);
  read_by(X, SIDE, 2);
  read_by(Y, SIDE, 3); /* never heard of */
  audit_freed(a, X, 4);
  audit_freed(a, Y, 5);
  check_silent();
}

/* ---- order of accesses ------------------------------------------------------- */

SCENE(a_read_before_the_producer_is_found)
{
  allocate(X, MAIN, 1);
  write_by(X, MAIN, 2);
  read_by(X, SIDE, 3);
  const audit_finding *f = only(AUDIT_READ_EARLY);
  CHECK_EQ(f->earlier.place.site, 2);
  CHECK(f->earlier.writes && !f->earlier.is_allocation);
  CHECK_EQ(f->later.place.site, 3);
  CHECK(f->later.stream.handle == SIDE);
  read_by(X, SIDE, 4); /* what is found once is not found again */
  CHECK_EQ(audit_finding_count(a), 1);
}

/* ---- graphs -------------------------------------------------------------------- */

/* A graph that reads x and allocates y, captured on SIDE. */
static void capture(void)
{
  begin();
  allocate(X, MAIN, 1);
  audit_capture_began(a, on(SIDE));
  read_by(X, SIDE, 2);
  allocate(Y, SIDE, 3);
  write_by(Y, SIDE, 4);
  audit_capture_ended(a, on(SIDE), 77);
}

/* On MAIN. */
static void replay(uint32_t site)
{
  audit_replayed(a, 77, on(MAIN), (audit_place){site, 0, 0});
}

enum { WHOLE = 1, HALF = 2 };

static void read_view(uint32_t site, uint64_t born, uint64_t like)
{
  const audit_access access = {.address = Y,
                               .bytes = {Y, SIZE, 0, 0},
                               .stream = on(MAIN),
                               .place = {site, 0, 0},
                               .born = born,
                               .like = like};
  audit_accessed(a, &access);
}

SCENE_WITH(a_replay_reads_its_inputs_and_writes_its_outputs, capture())
{
  replay(5);
  CHECK_EQ(audit_finding_count(a), 0);
  read_by(Y, SIDE, 6);
  CHECK_EQ(only(AUDIT_READ_EARLY)->earlier.place.site, 5);
  wait_for(SIDE, MAIN);
  wait_for(THIRD, SIDE);
  read_by(Y, THIRD, 7);
  CHECK_EQ(audit_finding_count(a), 1);
  replay(8); /* over what THIRD still reads */
  CHECK_EQ(audit_finding_count(a), 2);
  CHECK_EQ(audit_finding_at(a, 1)->kind, AUDIT_WRITE_EARLY);
  CHECK_EQ(audit_finding_at(a, 1)->earlier.place.site, 7);
}

SCENE_WITH(a_view_of_an_output_lasts_until_one_like_it_is_handed_out_for_a_later_replay, capture())
{
  CHECK_EQ(audit_generation(a, Y), 0);
  audit_handed_out(a, Y, WHOLE); /* before the first replay: it shows the newest */
  replay(5);
  CHECK_EQ(audit_generation(a, Y), 1);
  audit_handed_out(a, Y, WHOLE);
  read_view(6, 1, WHOLE);
  replay(7);
  audit_handed_out(a, Y, WHOLE);
  read_view(8, 2, WHOLE);
  read_view(8, 0, 0); /* a tensor that always shows the newest */
  CHECK_EQ(audit_finding_count(a), 0);
  read_view(9, 1, WHOLE);
  const audit_finding *f = only(AUDIT_STALE_OUTPUT);
  CHECK_EQ(f->earlier.place.site, 7);
  CHECK_EQ(f->later.place.site, 9);
}

/* A module makes its outputs once, and hands the same ones out after each replay. */
SCENE_WITH(a_view_that_is_made_once_shows_the_newest_output, capture())
{
  replay(5);
  audit_handed_out(a, Y, WHOLE);
  for (int i = 0; i < 3; i++) {
    read_view(6, 1, WHOLE);
    replay(5);
    audit_handed_out(a, Y, HALF); /* another one */
  }
  check_silent();
}

SCENE_WITH(a_view_of_another_graphs_output_at_the_same_address_is_not_stale, capture())
{
  for (int i = 0; i < 3; i++)
    replay(5);
  audit_handed_out(a, Y, WHOLE);
  audit_graph_destroyed(a, 77);
  audit_freed(a, Y, 6);
  audit_capture_began(a, on(SIDE));
  allocate(Y, SIDE, 3);
  audit_capture_ended(a, on(SIDE), 77);
  replay(5);
  audit_handed_out(a, Y, WHOLE);
  replay(5);
  read_view(7, 1, WHOLE);
  check_silent();
}

SCENE(memory_freed_inside_a_capture_may_serve_its_other_branch)
{
  audit_capture_began(a, on(MAIN));
  allocate(X, MAIN, 1);
  wait_for(SIDE, MAIN);
  read_by(X, SIDE, 2);
  audit_freed(a, X, 3);
  allocate(Y, MAIN, 4);
  write_by(Y, MAIN, 5);
  CHECK_EQ(only(AUDIT_FREED_IN_USE)->freed, 3);
  audit_capture_ended(a, on(MAIN), 0);
}

SCENE(what_others_find_counts_too)
{
  const audit_finding late = {.kind = AUDIT_USED_AFTER_FREE, .count = 1, .address = X, .freed = 3};
  audit_report(a, &late);
  audit_report(a, &late);
  CHECK_EQ(only(AUDIT_USED_AFTER_FREE)->count, 2);
}

/* ---- memory --------------------------------------------------------------------- */

SCENE(memory_is_bounded)
{
  size_t early = 0;
  for (uint64_t i = 0; i < 1000000; i++) {
    const int stream = MAIN + (int)(i % 3) * 10;
    const uintptr_t address = X + (i % 64) * 65536;
    allocate(address, stream, (uint32_t)(i % 5));
    audit_record(a, i, on(stream));
    audit_wait(a, on(MAIN), i);
    audit_wait(a, on(SIDE), i);
    touch_part(address, i % 7 * 100, 100, stream, 1, 2);
    touch_part(address, i % 7 * 100, 100, SIDE, 0, 3);
    audit_event_destroyed(a, i);
    audit_freed(a, address, 4);
    if (i == 10000)
      early = audit_memory(a);
  }
  CHECK(audit_memory(a) <= early);
}

/* Pieces of one block that are read, memory that is freed at one line, and kinds of views. */
SCENE_WITH(what_is_kept_of_a_block_and_of_a_line_is_bounded, capture())
{
  size_t early = 0;
  replay(5);
  for (uint64_t i = 0; i < 1000; i++) {
    touch_part(X, i, 1, THIRD, 0, 6);
    read_and_free(X + SIZE);
    audit_handed_out(a, Y, i);
    if (i == 100)
      early = audit_memory(a);
  }
  CHECK_EQ(audit_memory(a), early);
}

/* One call fails. Where it says nothing of that, it has missed nothing. */
SCENE(without_host_memory_it_says_so)
{
  int complete = 0;
  for (long calls = 0; calls < 60; calls++) {
    allocate(X, MAIN, 1);
    wait_for(SIDE, MAIN);
    check_fail_malloc(calls);
    allocate(Y, SIDE, 2);
    wait_for(MAIN, SIDE);
    read_by(Y, MAIN, 3);
    audit_marked(a, Y, on(MAIN), 0, 4);
    read_by(Y, MAIN, 5);
    audit_freed(a, Y, 6);
    audit_capture_began(a, on(THIRD));
    read_by(X, THIRD, 7);
    allocate(Y, THIRD, 8);
    audit_capture_ended(a, on(THIRD), 77);
    audit_replayed(a, 77, on(MAIN), (audit_place){9, 0, 0});
    read_by(Y, SIDE, 10);
    write_by(X, SIDE, 11);
    audit_judge_rest(a);
    check_limit_malloc(-1);
    complete = audit_is_complete(a);
    CHECK(!complete || (calls > 0 && audit_finding_count(a) == 3));
    audit_destroy(a);
    begin();
  }
  CHECK(complete);
}

/* ---- frees at one line ----------------------------------------------------- */

/* Memory that was allocated between two frees may be that of the first. */
SCENE(a_later_free_at_the_line_does_not_hide_an_earlier_one)
{
  read_and_free(X);
  allocate(Y, MAIN, 5);
  read_and_free(X + SIZE);
  write_by(Y, MAIN, 6);
  CHECK_EQ(only(AUDIT_FREED_IN_USE)->count, 1);
  CHECK_EQ(only(AUDIT_FREED_IN_USE)->address, X);
  wait_for(MAIN, SIDE);
  audit_judge_rest(a);
  CHECK_EQ(only(AUDIT_FREED_IN_USE)->count, 1);
}

/* MAIN waits for what was used first, which is freed last. */
SCENE(the_latest_use_counts_whichever_was_freed_last)
{
  allocate(X, MAIN, 1);
  allocate(X + SIZE, MAIN, 1);
  wait_for(SIDE, MAIN);
  read_by(X, SIDE, 2);
  audit_record(a, 1000, on(SIDE));
  read_by(X + SIZE, SIDE, 2);
  audit_freed(a, X + SIZE, 3);
  audit_freed(a, X, 3);
  audit_wait(a, on(MAIN), 1000);
  audit_judge_rest(a);
  only(AUDIT_FREED_IN_USE);
}

SCENE(the_last_free_is_the_one_that_is_asked_about)
{
  CHECK(!audit_last_free(a));
  allocate_and_read(X);
  allocate(Y, MAIN, 3);
  audit_freed(a, X, 4);
  CHECK(audit_last_free(a));
  CHECK_EQ(audit_last_free(a)->earlier.place.site, 2);
  audit_freed(a, X, 5); /* of which nothing is known */
  CHECK(!audit_last_free(a));
  audit_freed(a, Y, 6);
  CHECK(!audit_last_free(a));
}
