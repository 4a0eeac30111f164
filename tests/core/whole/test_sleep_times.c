/* How much of the time that copying takes sleep and wake take, on a device where calls of the
 * driver and copies take time: 50 GiB/s, and what the driver takes for pages. */
#include "esper_sleep.h"
#include "timed_device.h"

static const size_t CAPACITY = (size_t)80 << 30;

/* Bandwidth over that of a plain copy of the live bytes. */
typedef struct share {
  double sleep, wake;
} share;

/* Blocks of each size in turn, `mib` MiB of them. */
static void fill(size_t mib, const size_t *sizes, size_t count)
{
  void *p;
  for (size_t i = 0, bytes = 0; bytes < mib * MIB; bytes += sizes[i++ % count])
    CHECK_OK(esper_malloc(timed.w.core, sizes[i % count], timed.w.stream[0], &p));
}

static share measure(void)
{
  double times[3];
  double copy_us =
      COPY_US_MIB * (double)world_stats(&timed.w, 0).allocated_bytes[ESPER_ALL].current / MIB;
  times[0] = timed.now;
  CHECK_OK(esper_sleep(timed.w.core, -1, NULL, 0, ESPER_KEEP_HOST, NULL));
  times[1] = timed.now;
  CHECK_OK(esper_wake(timed.w.core, -1, NULL, 0, NULL));
  times[2] = timed.now;
  return (share){copy_us / (times[1] - times[0]), copy_us / (times[2] - times[1])};
}

static void begin(void)
{
  timed_begin(CAPACITY, &(esper_config){.segments = ESPER_SEGMENTS_MAPPED});
}

static const size_t WEIGHTS[] = {64 * MIB, 1 * MIB, 38 * MIB, 4 * MIB, 12 * MIB, 27 * MIB};
static const size_t SMALL[] = {1000000};

TEST(weights_take_little_more_than_their_copies)
{
  begin();
  fill(4096, WEIGHTS, 6);
  for (int cycle = 0; cycle < 2; cycle++) {
    share found = measure();
    CHECK(found.sleep > 0.98 && found.wake > 0.98);
  }
  timed_end();
}

/* Small blocks lie on pages of 2 MiB, which take longer to map than to fill. */
TEST(small_pages_are_mapped_while_large_ones_are_filled)
{
  begin();
  fill(1024, SMALL, 1);
  fill(2048, WEIGHTS, 6);
  share found = measure();
  CHECK(found.sleep > 0.95 && found.wake > 0.95);
  timed_end();
}
