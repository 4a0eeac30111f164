/* One thread acts while another is in the middle of a call. Most of it is for ThreadSanitizer;
 * test_block_cache.c and random_programs.c use more threads. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "core/api/testing.h"
#include "core/requests/malloc.h"
#include "core/requests/release.h"
#include "draw.h"
#include "world.h"

static world w;
/* Nobody asks the driver whether it is captured, so no lock of the simulation orders
 * the threads that allocate on it. */
static const esper_stream legacy;

/* ---- two at a time ----------------------------------------------------------- */

static atomic_bool over;

static void *refer_to_pool(void *unused)
{
  (void)unused;
  while (!atomic_load_explicit(&over, memory_order_relaxed)) {
    world_pool(&w, 0, 7, 0);
    CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  }
  return NULL;
}

TEST(a_pool_grows_while_somebody_refers_to_it)
{
  sim_options options = {.virtual_memory = 1, .capacity = (size_t)1 << 40};
  world_begin_with(&w, &options, &(esper_config){0});
  esper_pool *pool = world_pool(&w, 0, 7, 0);
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, refer_to_pool, NULL));
  for (int i = 0; i < 2000; i++) {
    void *p;
    CHECK_OK(esper_malloc_from(w.core, pool, 2 * MIB, w.stream[0], &p));
  }
  atomic_store(&over, true);
  pthread_join(thread, NULL);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  world_end(&w);
}

/* ---- everything beside everything -------------------------------------------- */

enum { THREADS = 5, TURNS = 12000, SHELF = 48, SHARED_POOLS = 2, POOL_ID = 50 };

typedef struct worker {
  int self;
  uint64_t state;
} worker;

static _Atomic(void *) shelf[SHELF]; /* blocks on their way to another thread */
static esper_pool *pools[SHARED_POOLS];
static _Thread_local const worker *current;

static uint64_t draw(worker *t, uint64_t below)
{
  return draw_below(&t->state, below);
}

static esper_stream draw_stream(worker *t)
{
  return draw(t, 3) ? w.stream[draw(t, 3)] : legacy;
}

static size_t draw_size(worker *t)
{
  static const size_t SIZES[] = {512,     4 * KIB, 4 * KIB,  300 * KIB, MIB,
                                 3 * MIB, 7 * MIB, 20 * MIB, 33 * MIB};
  return SIZES[draw(t, sizeof SIZES / sizeof *SIZES)];
}

/* There is not always memory; the rest must work. */
static void *try_malloc(size_t size, esper_stream stream, esper_pool *pool)
{
  void *p = NULL;
  esper_status status = pool ? esper_malloc_from(w.core, pool, size, stream, &p)
                             : esper_malloc(w.core, size, stream, &p);
  if (status != ESPER_OUT_OF_MEMORY && status != ESPER_REJECTED)
    CHECK_OK(status);
  return p;
}

static void put_on_shelf(worker *t, void *p)
{
  const void *q = atomic_exchange(&shelf[draw(t, SHELF)], p);
  if (q && !draw(t, 4))
    CHECK_OK(esper_record_stream(w.core, q, draw_stream(t)));
  if (q && !draw(t, 2))
    CHECK_OK(esper_note_use(w.core, (const void *[]){q}, 1, draw_stream(t)));
  if (q && !draw(t, 4))
    CHECK_OK(esper_record_use(w.core, &q, 1, draw_stream(t), draw(t, 8) ? 0 : ESPER_USE_UNTIL_FREE,
                              NULL));
  CHECK_OK(esper_free(w.core, (void *)q));
}

static int of_the_same_thread(void *context, void *stream)
{
  (void)stream;
  return current == context;
}

static void capture(worker *t)
{
  esper_stream r = w.stream[3 + t->self];
  uint64_t id = POOL_ID + SHARED_POOLS + (uint64_t)t->self;
  void *kept[2] = {0};
  if (draw(t, 2))
    id = POOL_ID; /* where others are at work */
  if (esper_pool_begin(w.core, 0, id, 0, of_the_same_thread, (void *)current) != ESPER_OK)
    return;
  sim_capture_begin(w.s, 0, r.handle);
  for (int i = 0; i < 2; i++) {
    kept[i] = try_malloc(draw_size(t), r, NULL);
    CHECK_OK(esper_free(w.core, try_malloc(draw_size(t), r, NULL)));
  }
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, id, 0, NULL));
  for (int i = 0; i < 2; i++)
    put_on_shelf(t, kept[i]);
  if (graph)
    sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_pool_release(w.core, 0, id, 0));
}

static void use_mortal_stream(worker *t)
{
  esper_stream m = world_mortal(&w, 0);
  const void *p = try_malloc(draw_size(t), draw_stream(t), NULL);
  if (p)
    CHECK_OK(esper_record_use(w.core, &p, 1, m, 0, NULL));
  CHECK_OK(esper_free(w.core, try_malloc(draw_size(t), m, NULL)));
  world_destroy_stream(&w, m);
  put_on_shelf(t, (void *)p);
}

static void use_event(worker *t)
{
  void *event = sim_event_create(w.s, 0);
  const void *p = try_malloc(draw_size(t), draw_stream(t), NULL);
  CHECK_OK(sim_event_record(w.s, 0, event, w.stream[draw(t, 3)].handle));
  if (p)
    CHECK_OK(esper_record_use_event(w.core, &p, 1, event, 0, NULL));
  sim_event_destroy(w.s, 0, event);
  put_on_shelf(t, (void *)p);
}

static void pin_and_unpin(worker *t)
{
  void *p = try_malloc(draw_size(t), draw_stream(t), NULL), *segment;
  if (!p)
    return;
  CHECK_OK(esper_pin(w.core, p, &segment));
  CHECK_OK(esper_free(w.core, p));
  esper_unpin(w.core, segment); /* others may have memory there */
}

static void share(worker *t)
{
  void *p = try_malloc(3 * MIB, draw_stream(t), NULL), *address, *there;
  esper_page_name *pages;
  size_t count;
  if (p && esper_share(w.core, p, &address, &pages, &count) == ESPER_OK) {
    if (esper_open_shared(w.core, 0, pages, count, &there) == ESPER_OK)
      CHECK_OK(esper_close_shared(w.core, there));
    free(pages);
  }
  put_on_shelf(t, p);
}

/* Of a pool of its own. */
static void take_checkpoint_and_go_back(worker *t)
{
  esper_checkpoint *checkpoint;
  uint64_t id = POOL_ID + 100 + (uint64_t)t->self;
  esper_pool *own = world_pool(&w, 0, id, 0);
  void *p = try_malloc(draw_size(t), draw_stream(t), own);
  CHECK_OK(esper_checkpoint_take(w.core, 0, id, 0, &checkpoint));
  try_malloc(draw_size(t), draw_stream(t), own);
  esper_checkpoint_delta delta;
  CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
  for (size_t i = 0; i < delta.live_count; i++)
    CHECK_OK(esper_free(w.core, delta.live[i]));
  CHECK_EQ(delta.live_count, p != NULL);
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
  CHECK_OK(esper_pool_release(w.core, 0, id, 0));
}

static void configure(worker *t)
{
  esper_config config = {
      .segments = (esper_segments)draw(t, 3),
      .allowance = draw(t, 3) ? draw(t, 4) * 16 * MIB : ESPER_ALLOWANCE_OFF,
  };
  CHECK_OK(esper_configure(w.core, &config));
}

static void look(worker *t)
{
  esper_stats stats;
  esper_counters counters;
  esper_snapshot snapshot;
  esper_pool_stats *figures;
  size_t count, bytes;
  esper_block_info info;
  CHECK(esper_core_is_valid(w.core));
  CHECK_OK(esper_get_stats(w.core, 0, &stats));
  CHECK_OK(esper_get_counters(w.core, 0, &counters));
  CHECK_OK(esper_snapshot_take(w.core, -1, &snapshot));
  esper_snapshot_free(&snapshot);
  CHECK_OK(esper_get_pool_stats(w.core, 0, &figures, &count));
  free(figures);
  CHECK_OK(esper_largest_available(w.core, 0, &bytes));
  char *p = try_malloc(4 * KIB, draw_stream(t), NULL);
  if (p) {
    CHECK_OK(esper_find_block(w.core, p + 256, &info));
    CHECK(info.address == p);
  }
  put_on_shelf(t, p);
}

static void nobody_told(void *context, const esper_trace_entry *entry)
{
  (void)context, (void)entry;
}

static void listen(worker *t)
{
  esper_trace_watch(w.core, draw(t, 2) ? nobody_told : NULL, NULL);
}

static void do_something_else(worker *t)
{
  switch (draw(t, 14)) {
  case 0: CHECK_OK(esper_empty_cache(w.core, 0, NULL)); break;
  case 1: CHECK_OK(esper_pool_empty(w.core, 0, POOL_ID + draw(t, SHARED_POOLS), 0)); break;
  case 2: configure(t); break;
  case 3: look(t); break;
  case 4: CHECK_OK(esper_reset_peak_stats(w.core, 0)); break;
  case 5: listen(t); break;
  case 6: CHECK_OK(esper_set_memory_fraction(w.core, 0, draw(t, 2) ? 1 : 0.5)); break;
  case 7: esper_retire(w.core, 0); break;
  case 8: share(t); break;
  case 9: use_mortal_stream(t); break;
  case 10: use_event(t); break;
  case 11: pin_and_unpin(t); break;
  case 12: take_checkpoint_and_go_back(t); break;
  default: capture(t);
  }
}

static void *do_everything(void *argument)
{
  worker *t = argument;
  current = t;
  for (int i = 0; i < TURNS; i++)
    if (draw(t, 20) == 0)
      do_something_else(t);
    else
      put_on_shelf(t, try_malloc(draw_size(t), draw_stream(t),
                                 draw(t, 5) ? NULL : pools[draw(t, SHARED_POOLS)]));
  return NULL;
}

/* A stream may begin to be captured after it was asked: the core then records an event
 * there, and asks again before it makes anything of it. */
static void not_so_strict(void *context, const char *report)
{
  (void)context;
  if (!strstr(report, "which is being captured"))
    check_failed("the simulation", 0, "%s", report);
}

TEST(everything_happens_beside_everything)
{
  sim_options options = {.virtual_memory = 1,
                         .devices = 2,
                         .capacity = 600 * MIB,
                         .completion = SIM_SEEDED,
                         .seed = 5};
  world_begin_with(&w, &options, &(esper_config){0});
  sim_on_failure(w.s, not_so_strict, NULL);
  core_set_pages_moved(w.core, 256);
  for (uint64_t i = 0; i < SHARED_POOLS; i++)
    pools[i] = world_pool(&w, 0, POOL_ID + i, 0);
  worker workers[THREADS];
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) {
    workers[i] = (worker){i, 0x9e3779b97f4a7c15u * (uint64_t)(i + 1)};
    CHECK(!pthread_create(&threads[i], NULL, do_everything, &workers[i]));
  }
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  for (int i = 0; i < SHELF; i++)
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[i], NULL)));
  esper_trace_watch(w.core, NULL, NULL);
  esper_unshare(w.core);
  for (uint64_t i = 0; i < SHARED_POOLS; i++)
    CHECK_OK(esper_pool_release(w.core, 0, POOL_ID + i, 0));
  CHECK_EQ(world_stats(&w, 0).allocated_bytes[ESPER_ALL].current, 0);
  world_check(&w);
  world_end(&w);
}
