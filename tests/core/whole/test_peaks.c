/* However late events complete, a program reserves at most an allowance more than when they
 * complete at once. Without an allowance it reserves many times as much, which shows that the
 * programs are sensitive. */
#include "draw.h"
#include "one_world.h"

static uint64_t state;

DRAW_FROM(state)

/* ---- programs --------------------------------------------------------------- */

static void *made(size_t mib, esper_stream stream)
{
  return block(mib * MIB, stream);
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
      world_read_marked(&w, compute, weight, comm);
      world_free(&w, weight);
      world_free(&w, x);
      x = y;
    }
  }
}

/* Memory of one stream that others read: how much there is, who reads it, and when
 * it is dropped are drawn. */
static void read_at_random(size_t least, size_t most)
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
    *p = made(least + draw(most - least + 1), owner);
    for (uint64_t readers = draw(4); readers > 0; readers--) {
      esper_stream reader = w.stream[1 + draw(3)];
      world_read_marked(&w, reader, *p, owner);
    }
  }
}

static void random_readers(void)
{
  read_at_random(12, 12);
}

/* Which block serves a request depends on what has merged by then. */
static void random_sizes(void)
{
  read_at_random(1, 32);
}

/* ---- runs ------------------------------------------------------------------- */

static int64_t peak_of(void program(void), sim_completion completion, uint64_t seed,
                       size_t allowance, esper_segments segments)
{
  begin_on((sim_options){.oracle = SIM_ORACLE_KNOWN,
                         .completion = completion,
                         .virtual_memory = segments == ESPER_SEGMENTS_MAPPED,
                         .capacity = (size_t)64 << 30,
                         .seed = seed},
           &(esper_config){.allowance = allowance, .segments = segments});
  state = seed;
  program();
  esper_stats stats = world_stats(&w, 0);
  world_end(&w);
  return stats.reserved_bytes[ESPER_ALL].peak;
}

/* ThreadSanitizer takes twenty times as long, and looks for others. */
#ifdef __SANITIZE_THREAD__
enum { SEEDS = 10 };
#else
enum { SEEDS = 100 };
#endif

/* The worst way is that nothing completes but by a wait of the host. */
static void check_peaks(void program(void), esper_segments segments, double share)
{
  const size_t allowance = 128 * MIB;
  double largest = 0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    int64_t at_once = peak_of(program, SIM_AT_ONCE, seed, allowance, segments);
    int64_t late = peak_of(program, SIM_WHEN_TOLD, seed, allowance, segments);
    double allowances = (double)(late - at_once) / (double)allowance;
    if (allowances > largest)
      largest = allowances;
    CHECK((double)late <= (double)allowance + (1 + share) * (double)at_once);
  }
  int64_t held = peak_of(program, SIM_WHEN_TOLD, 1, allowance, segments);
  int64_t off = peak_of(program, SIM_WHEN_TOLD, 1, ESPER_ALLOWANCE_OFF, segments);
  printf("  up to %.2f allowances more; without one %.1f times as much\n", largest,
         (double)off / (double)held);
  CHECK(off > 3 * held);
}

TEST(an_fsdp_like_pipeline_takes_an_allowance_more)
{
  check_peaks(fsdp_like, ESPER_SEGMENTS_CLASSIC, 0);
  check_peaks(fsdp_like, ESPER_SEGMENTS_MAPPED, 0);
}

TEST(random_readers_take_an_allowance_more)
{
  check_peaks(random_readers, ESPER_SEGMENTS_CLASSIC, 0);
  check_peaks(random_readers, ESPER_SEGMENTS_MAPPED, 0);
}
/* And what comes in pieces: which block serves depends on what has merged by then. */
TEST(many_sizes_take_an_allowance_more_and_a_third)
{
  check_peaks(random_sizes, ESPER_SEGMENTS_CLASSIC, .33);
  check_peaks(random_sizes, ESPER_SEGMENTS_MAPPED, .33);
}
