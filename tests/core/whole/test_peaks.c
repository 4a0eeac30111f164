/* Peaks depend neither on when events complete nor on how often the core is asked to look.
 *
 * With reuse order gate a program runs in several ways: events complete at once, now and then, or
 * only after the last operation, and before each malloc the core retires events or not. The peaks
 * of reserved bytes, and of active ones (counted until a block is satisfied or handed out again),
 * may differ by 2%. With reuse order grow they differ much, which shows that the programs are
 * sensitive.
 *
 * In these programs memory that one stream allocates and others read has few sizes, as gathered
 * weights and batches do. */
#include <stdbool.h>

#include "world.h"

static world w;
static uint64_t state;
static bool polls; /* ask what has completed before each malloc */

static uint64_t draw(uint64_t below)
{
  uint64_t x = state += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return (x ^ x >> 31) % below;
}

/* ---- programs --------------------------------------------------------------- */

/* The last read of p, on another stream than its owner's. */
static void read_mark_free(void *p, esper_stream owner, esper_stream reader)
{
  world_read_on(&w, reader, p, owner);
  world_use(&w, p, reader, 0);
  world_free(&w, p);
}

static void *made(size_t mib, esper_stream stream)
{
  if (polls)
    esper_retire(w.core, 0);
  void *p = world_malloc(&w, mib * MIB, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* Weights gathered on one stream, a layer ahead, and used on another. */
static void fsdp_like(void)
{
  enum { LAYERS = 48, STEPS = 4 };
  esper_stream compute = w.stream[0], comm = w.stream[1];
  void *x = made(64, compute);
  for (int step = 0; step < STEPS; step++) {
    void *ahead = made(32, comm);
    for (int i = 0; i < LAYERS; i++) {
      void *weight = ahead;
      if (i + 1 < LAYERS) {
        void *shards[2] = {made(16, comm), made(16, comm)};
        ahead = made(32, comm);
        world_free(&w, shards[0]);
        world_free(&w, shards[1]);
      }
      void *y = made(64, compute);
      read_mark_free(weight, comm, compute);
      world_free(&w, x);
      x = y;
    }
  }
}

/* Batches that are copied up to three steps ahead of their readers, of which
 * there are one or two. */
static void prefetch(void)
{
  enum { STEPS = 300, AHEAD = 3 };
  esper_stream compute = w.stream[0], other = w.stream[2], copies = w.stream[1];
  void *queue[AHEAD], *y = made(48, compute);
  int count = 0;
  for (int i = 0; i < STEPS; i++) {
    while (count < 1 || (count < AHEAD && draw(2)))
      queue[count++] = made(24, copies);
    void *batch = queue[0];
    memmove(queue, queue + 1, sizeof *queue * (size_t)--count);
    world_kernel(&w, compute, y);
    if (draw(2)) {
      world_read_on(&w, other, batch, copies);
      world_use(&w, batch, other, 0);
    }
    read_mark_free(batch, copies, compute);
  }
}

/* Memory of one stream that others read: how much there is, who reads it, and when
 * it is dropped are drawn. */
static void random_readers(void)
{
  enum { STEPS = 3000, LIVE = 24 };
  void *live[LIVE] = {NULL};
  esper_stream owner = w.stream[0];
  for (int i = 0; i < STEPS; i++) {
    void **p = &live[draw(LIVE)];
    if (*p) {
      world_free(&w, *p);
      *p = NULL;
      continue;
    }
    *p = made(12, owner);
    for (uint64_t readers = draw(4); readers > 0; readers--) {
      esper_stream reader = w.stream[1 + draw(3)];
      world_read_on(&w, reader, *p, owner);
      world_use(&w, *p, reader, 0);
    }
  }
}

/* The same with sizes of 1 to 32 MiB: which block serves a request depends on what has
 * merged by then. */
static void random_sizes(void)
{
  enum { STEPS = 3000, LIVE = 24 };
  void *live[LIVE] = {NULL};
  for (int i = 0; i < STEPS; i++) {
    void **p = &live[draw(LIVE)];
    if (*p) {
      world_free(&w, *p);
      *p = NULL;
      continue;
    }
    *p = made(1 + draw(32), w.stream[0]);
    for (uint64_t readers = draw(4); readers > 0; readers--) {
      esper_stream reader = w.stream[1 + draw(3)];
      world_read_on(&w, reader, *p, w.stream[0]);
      world_use(&w, *p, reader, 0);
    }
  }
}

/* ---- runs ------------------------------------------------------------------- */

/* When events complete, and whether somebody asks before each malloc. */
static const struct {
  sim_completion completion;
  bool polls;
} WAYS[] = {
    {SIM_AT_ONCE, false}, {SIM_AT_ONCE, true},    {SIM_SEEDED, false},
    {SIM_SEEDED, true},   {SIM_WHEN_TOLD, false},
};

enum { WAY_COUNT = sizeof WAYS / sizeof *WAYS };

/* Of the largest peak among the ways to the smallest. */
typedef struct spread {
  double reserved, active;
} spread;

static double spread_of(const int64_t peaks[WAY_COUNT])
{
  int64_t least = peaks[0], most = peaks[0];
  for (int i = 1; i < WAY_COUNT; i++) {
    if (peaks[i] < least)
      least = peaks[i];
    if (peaks[i] > most)
      most = peaks[i];
  }
  return (double)most / (double)least;
}

static spread run_all_ways(void program(void), uint64_t seed, esper_reuse_order order,
                           esper_segments segments)
{
  int64_t reserved[WAY_COUNT], active[WAY_COUNT];
  for (int i = 0; i < WAY_COUNT; i++) {
    sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                           .completion = WAYS[i].completion,
                           .virtual_memory = segments == ESPER_SEGMENTS_MAPPED,
                           .capacity = (size_t)64 << 30,
                           .seed = seed};
    esper_config config = {.reuse_order = order, .segments = segments};
    world_begin_with(&w, &options, &config);
    polls = WAYS[i].polls;
    state = seed;
    program();
    esper_stats stats = world_stats(&w, 0);
    world_end(&w);
    reserved[i] = stats.reserved_bytes[ESPER_ALL].peak;
    active[i] = stats.active_bytes[ESPER_ALL].peak;
  }
  return (spread){spread_of(reserved), spread_of(active)};
}

/* What the spreads of reuse order gate may be: the largest, and those that are not
 * exceeded more often than not. */
typedef struct bounds {
  spread most, median;
} bounds;

static const bounds NONE = {{1.02, 1.02}, {1.02, 1.02}}; /* worth speaking of */

/* The worst are rare. ThreadSanitizer takes twenty times as long, and looks for others. */
#ifdef __SANITIZE_THREAD__
enum { SEEDS = 10 };
#else
enum { SEEDS = 100 };
#endif

static void check_peaks(void program(void), esper_segments segments, bounds most)
{
  spread largest = {1, 1};
  int reserved = 0, active = 0; /* seeds that exceed the median's bounds */
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    spread gate = run_all_ways(program, seed, ESPER_REUSE_GATE, segments);
    if (gate.reserved > largest.reserved)
      largest.reserved = gate.reserved;
    if (gate.active > largest.active)
      largest.active = gate.active;
    reserved += gate.reserved > most.median.reserved;
    active += gate.active > most.median.active;
  }
  spread grow = run_all_ways(program, 1, ESPER_REUSE_GROW, segments);
  printf("  up to: reserved %.3f, active %.3f; reuse order grow: %.3f, %.3f; more than the "
         "median may be: %d and %d of %d\n",
         largest.reserved, largest.active, grow.reserved, grow.active, reserved, active, SEEDS);
  CHECK(largest.reserved <= most.most.reserved);
  CHECK(largest.active <= most.most.active);
  CHECK(2 * reserved <= SEEDS);
  CHECK(2 * active <= SEEDS);
  CHECK(grow.reserved > 1.5 * most.most.reserved);
}

TEST(peaks_of_an_fsdp_like_pipeline_do_not_depend_on_completion)
{
  check_peaks(fsdp_like, ESPER_SEGMENTS_CLASSIC, NONE);
}
TEST(peaks_of_prefetching_do_not_depend_on_completion)
{
  check_peaks(prefetch, ESPER_SEGMENTS_CLASSIC, NONE);
  check_peaks(prefetch, ESPER_SEGMENTS_MAPPED, NONE);
}
TEST(peaks_of_random_readers_do_not_depend_on_completion)
{
  check_peaks(random_readers, ESPER_SEGMENTS_CLASSIC, NONE);
  check_peaks(random_readers, ESPER_SEGMENTS_MAPPED, NONE);
}
/* Not within 2%, but far from what reuse order grow makes of it. */
TEST(peaks_of_many_sizes_depend_on_completion_only_so_much)
{
  check_peaks(random_sizes, ESPER_SEGMENTS_CLASSIC, (bounds){{1.45, 2.1}, {1.25, 1.6}});
  check_peaks(random_sizes, ESPER_SEGMENTS_MAPPED, (bounds){{1.5, 1.5}, {1.3, 1.25}});
}
/* One stream lends pages to the other where all streams have left them behind: the less often, the
 * more is reserved. */
TEST(peaks_of_a_pipeline_on_pages_depend_on_completion_only_so_much)
{
  check_peaks(fsdp_like, ESPER_SEGMENTS_MAPPED, (bounds){{1.75, 1.5}, {1.5, 1.2}});
}
