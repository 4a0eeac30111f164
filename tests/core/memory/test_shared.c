/* Pages that two processes share: one core names them, another opens them. Both are over one
 * simulated device, which knows where each page is mapped and who still accesses it. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "core/base/types.h"
#include "world.h"

static world w;
static esper_core *there; /* the other process */
static esper_stream r, far;
static esper_stream t, t_far; /* streams of the other process */

static void begin_with(int backed)
{
  sim_options options = {.devices = 2,
                         .oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .virtual_memory = 1,
                         .backed = backed,
                         .capacity = 256 * MIB};
  esper_config pages_of_4_mib = {.large_segment_size = 4 * MIB};
  world_begin_with(&w, &options, &pages_of_4_mib);
  CHECK_OK(esper_core_create(sim_driver(w.s), &pages_of_4_mib, &there));
  r = w.stream[0];
  far = world_stream(&w, 1);
  t = world_stream(&w, 0);
  t_far = world_stream(&w, 1);
  void *known; /* to the other process */
  CHECK_OK(esper_malloc(there, 512, t, &known));
  CHECK_OK(esper_free(there, known));
  CHECK_OK(esper_empty_cache(there, 0, NULL));
}

static void begin(void)
{
  begin_with(0);
}

static void end(void)
{
  CHECK(esper_core_is_valid(there));
  esper_core_destroy(there);
  world_end(&w);
}

static void *get(size_t mib)
{
  return world_malloc(&w, mib * MIB, r);
}

static uint64_t calls(sim_call call)
{
  return sim_calls(w.s, call);
}

static sim_alive alive(void)
{
  sim_alive now;
  sim_count_alive(w.s, 0, &now);
  return now;
}

/* What travels, and what came of it. */
typedef struct sent {
  esper_page_name *pages;
  size_t count, offset;
  void *base; /* in the other process; NULL: not opened */
} sent;

static sent share(const void *p)
{
  sent x = {0};
  void *address;
  CHECK_OK(esper_share(w.core, p, &address, &x.pages, &x.count));
  x.offset = (size_t)((const char *)p - (const char *)address);
  return x;
}

static char *open_there(sent *x)
{
  CHECK_OK(esper_open_shared(there, 0, x->pages, x->count, &x->base));
  return (char *)x->base + x->offset;
}

static char *send_there(const void *p, sent *x)
{
  *x = share(p);
  return open_there(x);
}

static void close_there(sent *x)
{
  CHECK_OK(esper_close_shared(there, x->base));
  free(x->pages);
}

static void touch(esper_stream stream, void *p, size_t size)
{
  sim_kernel(w.s, stream.device, stream.handle, p, size, SIM_READ | SIM_WRITE);
}

/* ---- naming ---------------------------------------------------------------- */

TEST(small_blocks_of_one_page_have_one_name)
{
  begin();
  void *p = world_malloc(&w, 512, r), *q = world_malloc(&w, 512, r);
  sent x = share(p), y = share(q);
  CHECK_EQ(x.count, 1);
  CHECK_EQ(y.count, 1);
  CHECK(!memcmp(x.pages, y.pages, sizeof *x.pages));
  CHECK_EQ(x.pages[0].size, 2 * MIB);
  CHECK_EQ(y.offset - x.offset, 512);
  CHECK_EQ(calls(SIM_CALL_page_export), 1);
  free(x.pages);
  free(y.pages);
  end();
}

TEST(a_block_names_all_of_its_pages)
{
  begin();
  get(3);
  void *p = get(10);
  sent x = share(p);
  size_t sum = 0;
  for (size_t i = 0; i < x.count; i++)
    sum += x.pages[i].size;
  CHECK(sum >= 10 * MIB && sum <= 18 * MIB && x.offset < 4 * MIB);
  sent y = share(p);
  CHECK_EQ(y.count, x.count);
  CHECK(!memcmp(x.pages, y.pages, x.count * sizeof *x.pages));
  CHECK_EQ(calls(SIM_CALL_page_export), x.count);
  CHECK_EQ(alive().names, x.count);
  free(x.pages);
  free(y.pages);
  end();
}

TEST(what_cannot_be_named_is_refused)
{
  begin();
  esper_config classic = {.segments = ESPER_SEGMENTS_CLASSIC};
  esper_page_name *pages;
  size_t count;
  void *address, *p = get(5);
  CHECK_STATUS(esper_share(w.core, &w, &address, &pages, &count), ESPER_INVALID);
  world_free(&w, p);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "no live block of a mapped segment"));
  CHECK_OK(esper_configure(w.core, &classic));
  p = get(50);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_INVALID);
  CHECK(!pages && !count);
  end();
}

TEST(pages_that_cannot_be_shared_say_so)
{
  begin();
  esper_page_name *pages;
  size_t count;
  void *address;
  sim_set_sharing(w.s, 0);
  void *p = get(10);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "cannot be exported"));
  CHECK(!pages && !count);
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* nothing holds them */
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  end();
}

static void *share_what_is_freed(void *p)
{
  esper_page_name *pages;
  size_t count;
  void *address;
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_INVALID);
  CHECK(!pages && !count);
  return NULL;
}

static struct {
  void *block;
  pthread_t sharer;
} named_late;

/* Another thread's share waits for the pages that are just going. */
static void share_and_free(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  void *p = named_late.block;
  if (!p)
    return;
  named_late.block = NULL;
  CHECK(!pthread_create(&named_late.sharer, NULL, share_what_is_freed, p));
  usleep(100000);
  world_free(&w, p);
}

TEST(what_is_freed_before_it_is_named_is_refused)
{
  begin();
  named_late.block = get(10);
  world_free(&w, get(10));
  sim_before_call(w.s, SIM_CALL_page_unmap, share_and_free, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_before_call(w.s, SIM_CALL_page_unmap, NULL, NULL);
  pthread_join(named_late.sharer, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  CHECK_EQ(alive().names, 0);
  end();
}

/* Memory of others grows and grows, always somebody's. */
static void *grow_and_shrink(void *over)
{
  while (!atomic_load((atomic_bool *)over)) {
    void *p;
    CHECK_OK(esper_malloc(w.core, 32 * MIB, (esper_stream){0}, &p));
    CHECK_OK(esper_free(w.core, p));
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  }
  return NULL;
}

static void take_time(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  usleep(1000);
}

TEST(who_shares_has_a_turn_while_the_memory_of_others_grows)
{
  enum { THREADS = 4 };
  atomic_bool over = false;
  pthread_t threads[THREADS];
  begin();
  void *p = get(10);
  sim_before_call(w.s, SIM_CALL_page_map, take_time, NULL);
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&threads[i], NULL, grow_and_shrink, &over));
  usleep(50000);
  alarm(300); /* without a turn this never ends */
  for (int i = 0; i < 5; i++) {
    sent x = share(p);
    CHECK(x.count > 0);
    free(x.pages);
  }
  alarm(0);
  atomic_store(&over, true);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  end();
}

/* ---- both have it ---------------------------------------------------------- */

TEST(what_one_writes_the_other_reads)
{
  begin_with(1);
  char *p = get(9);
  sent x;
  char *q = send_there(p, &x);
  CHECK(q != p);
  for (size_t i = 0; i < 9 * MIB; i += 4096)
    p[i] = (char)(i / 4096 % 251);
  for (size_t i = 0; i < 9 * MIB; i += 4096)
    CHECK_EQ(q[i], (char)(i / 4096 % 251));
  q[5 * MIB] = 77;
  CHECK_EQ(p[5 * MIB], 77);
  close_there(&x);
  end();
}

/* Pages that were free here and there come together, in order. */
TEST(a_stitched_block_is_shared)
{
  begin_with(1);
  void *p[8];
  for (int i = 0; i < 8; i++)
    p[i] = get(8);
  for (int i = 0; i < 8; i += 2)
    world_free(&w, p[i]);
  uint64_t created = calls(SIM_CALL_page_create);
  char *large = get(30);
  CHECK_EQ(calls(SIM_CALL_page_create), created);
  sent x;
  char *q = send_there(large, &x);
  for (size_t i = 0; i < 30 * MIB; i += 65536)
    large[i] = (char)(i / 65536 % 249);
  for (size_t i = 0; i < 30 * MIB; i += 65536)
    CHECK_EQ(q[i], (char)(i / 65536 % 249));
  close_there(&x);
  end();
}

TEST(kernels_of_both_touch_it)
{
  begin();
  void *p = get(9);
  sent x;
  touch(r, p, 9 * MIB);
  char *q = send_there(p, &x);
  world_wait(&w, t, r);
  touch(t, q, 9 * MIB);
  world_wait(&w, r, t);
  touch(r, p, 9 * MIB);
  close_there(&x);
  end();
}

TEST(it_may_be_opened_more_than_once)
{
  begin();
  void *p = get(9);
  sent x = share(p), y = share(p);
  char *a = open_there(&x), *b = open_there(&y);
  CHECK(a != b);
  CHECK_EQ(alive().mappings, x.count * 3);
  close_there(&x);
  touch(t, b, 9 * MIB);
  close_there(&y);
  CHECK_EQ(alive().mappings, x.count);
  end();
}

/* ---- pages stay ------------------------------------------------------------ */

TEST(shared_pages_neither_move_nor_go_back)
{
  begin();
  void *p[4];
  for (int i = 0; i < 4; i++)
    p[i] = get(20);
  sent x = share(p[1]), y = share(p[3]);
  for (int i = 0; i < 4; i++)
    world_free(&w, p[i]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 40 * MIB);
  uint64_t unmapped = calls(SIM_CALL_page_unmap);
  void *large = get(40); /* from where the first one is on */
  CHECK(large == p[1]);
  CHECK_EQ(calls(SIM_CALL_page_unmap), unmapped);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 60 * MIB);
  world_free(&w, large);
  CHECK(get(20) == p[1]); /* where they are they serve on */
  world_check(&w);
  free(x.pages);
  free(y.pages);
  end();
}

/* What is before or behind them in the same free block moves. */
TEST(pages_beside_shared_ones_go_back)
{
  begin();
  void *p = get(20), *q = get(4), *s = get(20);
  sent x = share(q);
  world_free(&w, p);
  world_free(&w, q);
  world_free(&w, s);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 4 * MIB);
  world_check(&w);
  free(x.pages);
  end();
}

TEST(what_is_not_live_can_be_unshared)
{
  begin();
  void *p = get(20), *q = get(20), *a = world_malloc(&w, 512, r), *b = world_malloc(&w, 512, r);
  sent x = share(p), y = share(q), z = share(a);
  CHECK_EQ(esper_unshare(w.core), 0);
  world_free(&w, p);
  world_free(&w, a); /* b lies on its page */
  CHECK_EQ(esper_unshare(w.core), 5);
  CHECK_EQ(alive().names, y.count + 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 22 * MIB);
  CHECK_STATUS(esper_open_shared(there, 0, x.pages, x.count, &x.base), ESPER_INVALID);
  CHECK(!x.base && strstr(esper_last_error(), "nobody offers"));
  open_there(&y);
  open_there(&z);
  world_free(&w, q);
  world_free(&w, b);
  CHECK_EQ(esper_unshare(w.core), 6);
  CHECK_EQ(esper_unshare(w.core), 0);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  CHECK_EQ(alive().bytes, 22 * MIB); /* the other process has them */
  free(x.pages);
  close_there(&y);
  close_there(&z);
  CHECK_EQ(alive().bytes, 0);
  end();
}

TEST(a_page_can_be_shared_again)
{
  begin();
  void *p = get(8);
  sent x = share(p);
  world_free(&w, p);
  CHECK_EQ(esper_unshare(w.core), 2);
  CHECK(get(8) == p);
  sent y = share(p);
  CHECK(x.pages[0].number != y.pages[0].number);
  open_there(&y);
  close_there(&y);
  free(x.pages);
  end();
}

TEST(the_memory_outlives_the_core_that_named_it)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN, .virtual_memory = 1};
  sim *s = sim_create(&options);
  esper_core *here;
  CHECK_OK(esper_core_create(sim_driver(s), NULL, &here));
  CHECK_OK(esper_core_create(sim_driver(s), NULL, &there));
  esper_stream st = {sim_stream_create(s, 0), 0, ESPER_STREAM_IMMORTAL};
  void *p, *address, *base;
  esper_page_name *pages;
  size_t count;
  CHECK_OK(esper_malloc(here, 9 * MIB, st, &p));
  CHECK_OK(esper_share(here, p, &address, &pages, &count));
  CHECK_OK(esper_open_shared(there, 0, pages, count, &base));
  esper_core_destroy(here);
  sim_alive now;
  sim_count_alive(s, 0, &now);
  CHECK(now.bytes >= 9 * MIB);
  CHECK_EQ(now.names, 0);
  CHECK_EQ(now.ranges, 1);
  sim_owner_begin(s, base, 9 * MIB, 0, st.handle);
  sim_kernel(s, 0, st.handle, base, 9 * MIB, SIM_READ);
  sim_owner_end(s, base);
  CHECK_OK(esper_close_shared(there, base));
  sim_count_alive(s, 0, &now);
  CHECK_EQ(now.bytes + now.ranges + now.mappings + now.pages, 0);
  esper_core_destroy(there);
  CHECK_EQ(sim_failures(s), 0);
  sim_destroy(s);
  free(pages);
}

TEST(what_is_not_closed_goes_with_the_core)
{
  begin();
  sent x, y;
  send_there(get(9), &x);
  send_there(world_malloc(&w, 512, r), &y);
  free(x.pages);
  free(y.pages);
  end(); /* which looks for what is left */
}

/* ---- closing --------------------------------------------------------------- */

/* The oracle complains if it does not. */
TEST(closing_waits_for_what_is_at_work)
{
  begin();
  void *p = get(9);
  sent x;
  char *q = send_there(p, &x);
  touch(t, q, 9 * MIB);
  CHECK_EQ(sim_pending_all(w.s), 1);
  close_there(&x);
  CHECK_EQ(sim_pending_all(w.s), 0);
  CHECK_EQ(alive().ranges, 1);
  end();
}

/* PyTorch's streams are many, and the core meets those that get memory. */
TEST(closing_waits_for_streams_that_the_core_never_met)
{
  begin();
  sent x;
  char *q = send_there(get(9), &x);
  esper_stream unmet = world_stream(&w, 0);
  touch(unmet, q, 9 * MIB);
  close_there(&x);
  CHECK_EQ(sim_pending_all(w.s), 0);
  CHECK_EQ(alive().ranges, 1);
  end();
}

TEST(closing_waits_for_peers_at_work)
{
  begin();
  void *p = get(9), *known;
  sent x;
  CHECK_OK(esper_malloc(there, 512, t_far, &known));
  CHECK_OK(esper_add_peer(there, 0, 1));
  char *q = send_there(p, &x);
  touch(t_far, q, 9 * MIB);
  close_there(&x);
  CHECK_EQ(sim_pending(w.s, 1, t_far.handle), 0);
  CHECK_EQ(alive().ranges, 1);
  end();
}

TEST(in_a_capture_closing_is_for_later)
{
  begin();
  void *p = get(9), *q;
  sent x;
  char *a = send_there(p, &x);
  touch(t, a, 9 * MIB);
  esper_stream other = world_mortal(&w, 0); /* takes part in waiting for the device */
  CHECK_OK(esper_malloc(there, 512, other, &q));
  CHECK_OK(esper_malloc(there, 512, t, &q));
  sim_capture_begin(w.s, 0, t.handle);
  close_there(&x);
  CHECK_EQ(alive().ranges, 3);
  CHECK(sim_capture_is_valid(w.s, 0, t.handle));
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, t.handle));
  CHECK_STATUS(esper_close_shared(there, x.base), ESPER_INVALID); /* it is closed */
  CHECK_EQ(alive().ranges, 3);
  CHECK_OK(esper_empty_cache(there, 0, NULL));
  CHECK_EQ(alive().ranges, 2);
  end();
}

static int any_stream(void *unused, void *stream)
{
  (void)unused, (void)stream;
  return 1;
}

/* Its stream has got no memory yet, so nobody knows of it. */
TEST(while_a_pool_is_open_closing_is_for_later)
{
  begin();
  sent x;
  send_there(get(9), &x);
  esper_stream unmet = world_stream(&w, 0);
  CHECK_OK(esper_pool_begin(there, 0, 9, 0, any_stream, NULL));
  sim_capture_begin(w.s, 0, unmet.handle);
  close_there(&x);
  CHECK(sim_capture_is_valid(w.s, 0, unmet.handle));
  CHECK_EQ(alive().ranges, 2);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, unmet.handle));
  CHECK_OK(esper_pool_end(there, 0, 9, 0, NULL));
  CHECK_OK(esper_pool_release(there, 0, 9, 0));
  CHECK_OK(esper_empty_cache(there, 0, NULL));
  CHECK_EQ(alive().ranges, 1);
  end();
}

TEST(nobody_waits_for_rendezvous_work)
{
  begin();
  sent x, y;
  char *a = send_there(get(9), &x);
  send_there(get(5), &y);
  touch(t, a, 9 * MIB);
  CHECK_OK(esper_stream_set_traits(there, t, ESPER_TRAIT_RENDEZVOUS));
  close_there(&x);
  CHECK_EQ(sim_pending_all(w.s) > 0, 1);
  uint64_t unmapped = calls(SIM_CALL_page_unmap);
  CHECK_OK(esper_stream_set_traits(there, t, 0));
  close_there(&y); /* and the other one */
  CHECK_EQ(calls(SIM_CALL_page_unmap), unmapped + x.count + y.count);
  CHECK_EQ(alive().ranges, 1);
  end();
}

TEST(only_what_is_open_is_closed)
{
  begin();
  sent x;
  CHECK_STATUS(esper_close_shared(there, &w), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "no shared memory that was opened"));
  send_there(get(9), &x);
  CHECK_STATUS(esper_close_shared(w.core, x.base), ESPER_INVALID);
  CHECK_STATUS(esper_close_shared(there, (char *)x.base + 512), ESPER_INVALID);
  close_there(&x);
  CHECK_STATUS(esper_close_shared(there, x.base), ESPER_INVALID);
  end();
}

/* ---- peers ----------------------------------------------------------------- */

TEST(peers_access_what_is_shared)
{
  begin();
  sent x, y;
  char *a = send_there(get(9), &x);
  CHECK(!sim_may_access(w.s, 1, a, 9 * MIB));
  CHECK_OK(esper_add_peer(there, 0, 1));
  CHECK(sim_may_access(w.s, 1, a, 9 * MIB));
  char *b = send_there(get(12), &y);
  CHECK(sim_may_access(w.s, 1, b, 12 * MIB));
  close_there(&x);
  close_there(&y);
  end();
}

TEST(a_peer_that_is_refused_has_no_access_to_what_is_shared)
{
  begin();
  sent x, y;
  char *a = send_there(get(9), &x), *b = send_there(get(12), &y);
  sim_fail_call(w.s, SIM_CALL_page_access, 2, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_add_peer(there, 0, 1), ESPER_DEVICE_ERROR);
  CHECK(!sim_may_access(w.s, 1, a, 9 * MIB) && !sim_may_access(w.s, 1, b, 12 * MIB));
  CHECK_OK(esper_add_peer(there, 0, 1));
  CHECK(sim_may_access(w.s, 1, a, 9 * MIB) && sim_may_access(w.s, 1, b, 12 * MIB));
  close_there(&x);
  close_there(&y);
  end();
}

/* ---- the driver refuses ---------------------------------------------------- */

TEST(names_that_make_no_sense_are_refused)
{
  begin();
  sent x = share(get(9));
  esper_page_name wrong = x.pages[0];
  void *base;
  sim_alive before = alive();
  CHECK_STATUS(esper_open_shared(there, 0, x.pages, 0, &base), ESPER_INVALID);
  CHECK_STATUS(esper_open_shared(there, 2, x.pages, 1, &base), ESPER_INVALID);
  wrong.size = 12345;
  CHECK_STATUS(esper_open_shared(there, 0, &wrong, 1, &base), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "multiples of"));
  wrong.size = (uint64_t)1 << 63;
  CHECK_STATUS(esper_open_shared(there, 0, &wrong, 1, &base), ESPER_INVALID);
  wrong = x.pages[0];
  wrong.key++;
  CHECK_STATUS(esper_open_shared(there, 0, &wrong, 1, &base), ESPER_INVALID);
  sim_alive after = alive();
  CHECK(!base && !memcmp(&before, &after, sizeof before));
  free(x.pages);
  end();
}

TEST(a_device_without_pages_opens_none)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN};
  esper_page_name name = {.size = 2 * MIB};
  void *base;
  world_begin_with(&w, &options, NULL);
  CHECK_STATUS(esper_open_shared(w.core, 0, &name, 1, &base), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "classic segments"));
  world_end(&w);
}

/* Whatever is refused on the way, once, nothing is left of it, and the next time it works. */
TEST(what_is_refused_on_opening_leaves_nothing)
{
  static const sim_call CALLS[] = {SIM_CALL_range_reserve, SIM_CALL_page_import, SIM_CALL_page_map};
  for (size_t c = 0; c < 3; c++)
    for (uint64_t nth = 1; nth <= (c ? 3 : 1); nth++) {
      begin();
      sent x = share(get(12));
      CHECK_EQ(x.count, 3);
      sim_alive before = alive();
      sim_fail_call(w.s, CALLS[c], nth, ESPER_DEVICE_ERROR);
      CHECK_STATUS(esper_open_shared(there, 0, x.pages, x.count, &x.base), ESPER_DEVICE_ERROR);
      sim_alive after = alive();
      CHECK(!x.base && !memcmp(&before, &after, sizeof before));
      open_there(&x);
      close_there(&x);
      end();
    }
}

/* What the driver would not take back goes the next time. */
TEST(what_is_refused_on_closing_goes_later)
{
  static const sim_call CALLS[] = {SIM_CALL_page_unmap, SIM_CALL_page_release, SIM_CALL_range_free,
                                   SIM_CALL_event_record};
  for (size_t c = 0; c < 4; c++)
    for (int k = 0; k < 4; k++) {
      uint64_t nth = 1 + (uint64_t)(k / 2);
      bool opening = k % 2;
      begin();
      sent x = share(get(12));
      sim_alive before = alive();
      if (opening) { /* the undoing of what was refused */
        sim_fail_call(w.s, SIM_CALL_page_map, 3, ESPER_DEVICE_ERROR);
        sim_fail_call(w.s, CALLS[c], nth, ESPER_DEVICE_ERROR);
        CHECK_STATUS(esper_open_shared(there, 0, x.pages, x.count, &x.base), ESPER_DEVICE_ERROR);
        CHECK(!x.base);
        free(x.pages);
      } else {
        touch(t, open_there(&x), 512);
        sim_fail_call(w.s, CALLS[c], nth, ESPER_DEVICE_ERROR);
        close_there(&x);
      }
      sim_fail_call(w.s, CALLS[c], 0, ESPER_OK);
      CHECK_OK(esper_empty_cache(there, 0, NULL));
      sim_alive after = alive();
      before.events = after.events;
      CHECK(!memcmp(&before, &after, sizeof before));
      end();
    }
}

TEST(what_is_refused_on_naming_is_named_later)
{
  begin();
  void *p = get(12), *address;
  esper_page_name *pages;
  size_t count;
  sim_fail_call(w.s, SIM_CALL_page_export, 2, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_DEVICE_ERROR);
  CHECK(!pages && !count);
  sent x = share(p);
  CHECK_EQ(x.count, 3);
  world_free(&w, p);
  sim_fail_call(w.s, SIM_CALL_page_unexport, 1, ESPER_DEVICE_ERROR);
  CHECK_EQ(esper_unshare(w.core), 2);
  CHECK_EQ(esper_unshare(w.core), 1);
  free(x.pages);
  end();
}

TEST(there_may_be_no_host_memory)
{
  begin();
  void *p = get(12), *address;
  esper_page_name *pages = NULL;
  size_t count;
  sim_alive before = alive();
  for (long calls = 0; calls < 3; calls++) { /* the list, and the page after the last one */
    check_limit_malloc(calls);
    esper_status status = esper_share(w.core, p, &address, &pages, &count);
    check_limit_malloc(-1);
    CHECK_STATUS(status, ESPER_HOST_MEMORY);
  }
  CHECK_EQ(before.mappings, alive().mappings);
  sent x = share(p);
  before = alive();
  check_limit_malloc(0);
  esper_status status = esper_open_shared(there, 0, x.pages, x.count, &x.base);
  check_limit_malloc(-1);
  CHECK_STATUS(status, ESPER_HOST_MEMORY);
  sim_alive after = alive();
  CHECK(!x.base && !memcmp(&before, &after, sizeof before));
  free(x.pages);
  end();
}
