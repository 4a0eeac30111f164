/* Long runs with drifting sizes do not fragment more and more.
 *
 * The usual size moves from 4 KiB to 8 MiB and back eight times. Blocks live for a random time,
 * some of them very long. For each of the eight cycles the ratio of the peak of reserved to the
 * peak of live memory is taken. It may not grow after the first cycle. One run's figures vary by
 * about a hundredth with the sizes drawn, so those of eight runs are averaged.
 *
 * ESPER_DRIFT_OPERATIONS sets the number of mallocs and frees, 2,000,000 by default. With a hundred
 * million there is one run, half a minute a test:
 *
 *   ESPER_DRIFT_OPERATIONS=100000000 build/plain/test_drift */
#include <stdbool.h>

#include "draw.h"
#include "one_world.h"

enum { CYCLES = 8, MOST_BLOCKS = 20000, LEAST_LOG = 12, MOST_LOG = 23 };

/* Reserved over live in the last cycles of the short runs, with classic and with mapped
 * segments: lower them when the core gets better. */
static const double MOST_CLASSIC = 1.95, MOST_MAPPED = 1.425;
enum { SHORT_RUN = 2000000, RUNS = 8 };

static const size_t MOST_BYTES = (size_t)4 << 30;

typedef struct piece {
  void *ptr;
  size_t size;
  bool stays;
} piece;

static uint64_t state;
static piece blocks[MOST_BLOCKS];
static int block_count;
static size_t live, live_peak;

DRAW_FROM(state)

/* `phase` from 0 to 1 is once up and down; the sizes of a moment lie within a factor
 * of eight. */
static size_t draw_size(double phase)
{
  double usual = phase < 0.5 ? 2 * phase : 2 - 2 * phase;
  double log = LEAST_LOG + usual * (MOST_LOG - LEAST_LOG - 3) + 3 * (double)draw(4096) / 4096;
  size_t base = (size_t)1 << (int)log;
  return base + (size_t)((log - (int)log) * (double)base);
}

static void make(double phase)
{
  piece *b = &blocks[block_count++];
  *b = (piece){.size = draw_size(phase), .stays = draw(50) == 0};
  CHECK_OK(esper_malloc(w.core, b->size, w.stream[0], &b->ptr));
  live += b->size;
  if (live > live_peak)
    live_peak = live;
}

static void drop(void)
{
  int i = (int)draw((uint64_t)block_count);
  if (blocks[i].stays && draw(50))
    i = (int)draw((uint64_t)block_count);
  CHECK_OK(esper_free(w.core, blocks[i].ptr));
  live -= blocks[i].size;
  blocks[i] = blocks[--block_count];
}

static uint64_t operations(void)
{
  const char *given = getenv("ESPER_DRIFT_OPERATIONS");
  return given && *given ? strtoull(given, NULL, 10) : SHORT_RUN;
}

/* Of one cycle: the peak of reserved over that of live. */
static double run_cycle(uint64_t count)
{
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  live_peak = live;
  for (uint64_t n = 0; n < count; n++) {
    bool full = live > MOST_BYTES || block_count == MOST_BLOCKS;
    if (full || (block_count && draw(100) < 48))
      drop();
    else
      make((double)n / (double)count);
  }
  return (double)world_stats(&w, 0).reserved_bytes[ESPER_ALL].peak / (double)live_peak;
}

/* Reserved over live: on average in cycles 2 to 4, and in the last three. */
typedef struct figures {
  double early, late;
} figures;

static figures run(bool virtual_memory, uint64_t seed)
{
  begin_on((sim_options){.capacity = (size_t)64 << 30, .virtual_memory = virtual_memory}, NULL);
  state = seed;
  block_count = 0;
  live = 0;
  uint64_t count = operations() / CYCLES;
  double ratios[CYCLES];
  size_t metadata[CYCLES];
  for (int i = 0; i < CYCLES; i++) {
    ratios[i] = run_cycle(count);
    metadata[i] = world_counters(&w, 0).metadata_bytes;
  }
  CHECK((alive().pages > 0) == virtual_memory);
  CHECK(esper_core_is_valid(w.core));
  CHECK(metadata[CYCLES - 1] <= metadata[3] * 110 / 100);
  while (block_count)
    drop();
  world_end(&w);
  return (figures){(ratios[1] + ratios[2] + ratios[3]) / 3,
                   (ratios[5] + ratios[6] + ratios[7]) / 3};
}

static void run_all(bool virtual_memory, double most)
{
#ifdef __SANITIZE_THREAD__
  printf("  skipped: one thread has no races\n");
  return;
#endif
  uint64_t runs = operations() == SHORT_RUN ? RUNS : 1;
  figures mean = {0, 0};
  for (uint64_t seed = 1; seed <= runs; seed++) {
    figures one = run(virtual_memory, seed);
    mean.early += one.early / (double)runs;
    mean.late += one.late / (double)runs;
  }
  printf("  reserved / live: early %.4f, late %.4f\n", mean.early, mean.late);
  CHECK(mean.late <= 1.02 * mean.early);
  CHECK(operations() != SHORT_RUN || mean.late <= most);
}

TEST(drifting_sizes_do_not_fragment_more_and_more)
{
  run_all(false, MOST_CLASSIC);
}

TEST(drifting_sizes_on_pages_do_not_fragment_more_and_more)
{
  run_all(true, MOST_MAPPED);
}
