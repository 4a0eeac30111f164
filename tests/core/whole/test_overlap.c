/* Holding the host back must not cost overlap: programs that copy and compute on several
 * streams, on a device where work takes time. */
#include "draw.h"
#include "timed_device.h"

static uint64_t state;

DRAW_FROM(state)

typedef struct cost {
  double step_us;
  size_t reserved; /* peak, in MiB */
} cost;

static size_t least_mib, most_mib;
static int compute_streams;
static double copy_us_mib = 17, compute_us_mib = 26;

/* A tensor is copied in on one stream, read by one or two others, and the result is copied out on
 * another. Each is marked and dropped at once; the host waits after every 8 batches. */
static void pipeline_step(void)
{
  esper_stream in = timed.w.stream[0], out = timed.w.stream[1];
  for (int batch = 0; batch < 8; batch++) {
    size_t mib = least_mib + draw(most_mib - least_mib + 1);
    esper_stream compute = timed.w.stream[2 + batch % compute_streams];
    void *x = world_malloc(&timed.w, mib * MIB, in);
    timed_kernel(in, copy_us_mib * (double)mib);
    timed_wait(compute, in);
    void *y = world_malloc(&timed.w, mib * MIB, compute);
    for (int i = 0; i < 6; i++)
      timed_kernel(compute, compute_us_mib * (double)mib / 6);
    timed_mark_free(x, compute);
    timed_wait(out, compute);
    timed_kernel(out, copy_us_mib * (double)mib);
    timed_mark_free(y, out);
  }
  timed_host_waits();
}

/* Weights gathered a layer ahead on one stream and used on another. */
static void fsdp_step(void)
{
  enum { LAYERS = 48 };
  esper_stream comm = timed.w.stream[0], compute = timed.w.stream[1];
  size_t size = least_mib * MIB;
  void *ahead = world_malloc(&timed.w, size, comm);
  timed_kernel(comm, 200);
  for (int i = 0; i < LAYERS; i++) {
    void *weight = ahead;
    timed_wait(compute, comm);
    if (i + 1 < LAYERS) {
      ahead = world_malloc(&timed.w, size, comm);
      timed_kernel(comm, 200);
    }
    timed_kernel(compute, 450);
    timed_mark_free(weight, compute);
  }
}

/* ---- what they cost ------------------------------------------------------------- */

static const size_t CAPACITY = (size_t)140 << 30;
static const esper_segments KINDS[] = {ESPER_SEGMENTS_MAPPED, ESPER_SEGMENTS_CLASSIC};

static cost run(void step(void), size_t allowance, esper_segments segments, double fraction)
{
  enum { WARM_UP = 20, STEPS = 60 };
  esper_config config = {.allowance = allowance, .segments = segments};
  state = 1;
  timed_begin(CAPACITY, &config);
  CHECK_OK(esper_set_memory_fraction(timed.w.core, 0, fraction));
  for (int i = 0; i < WARM_UP; i++)
    step();
  timed_host_waits();
  double begun = timed.now;
  for (int i = 0; i < STEPS; i++)
    step();
  timed_host_waits();
  cost c = {(timed.now - begun) / STEPS,
            (size_t)world_stats(&timed.w, 0).reserved_bytes[ESPER_ALL].peak / MIB};
  timed_end();
  return c;
}

static void check_pipeline(size_t least, size_t most, int streams)
{
  least_mib = least, most_mib = most, compute_streams = streams;
  for (int kind = 0; kind < 2; kind++) {
    cost by_default = run(pipeline_step, 0, KINDS[kind], 1);
    cost off = run(pipeline_step, ESPER_ALLOWANCE_OFF, KINDS[kind], 1);
    printf("  %zu to %zu MiB, %d readers: step %.3f, reserved %.3f of that without an allowance\n",
           least, most, streams, by_default.step_us / off.step_us,
           (double)by_default.reserved / (double)off.reserved);
    CHECK(by_default.step_us < 1.02 * off.step_us);
    CHECK(by_default.reserved < (kind ? 1.0 : 0.8) * (double)off.reserved);
  }
}

TEST(pipelines_lose_no_overlap)
{
  for (int readers = 1; readers <= 2; readers++) {
    check_pipeline(4, 64, readers);
    check_pipeline(256, 1024, readers);
  }
}

/* Two layers are needed; the allowance is 128 MiB, or two layers if these are larger. */
TEST(gathered_weights_take_the_allowance_at_most)
{
  for (int kind = 0; kind < 2; kind++)
    for (least_mib = 32; least_mib <= 512; least_mib *= 4) {
      cost by_default = run(fsdp_step, 0, KINDS[kind], 1);
      cost off = run(fsdp_step, ESPER_ALLOWANCE_OFF, KINDS[kind], 1);
      printf("  layers of %zu MiB: reserved %zu MiB (%zu), step %.3f\n", least_mib,
             by_default.reserved, off.reserved, by_default.step_us / off.step_us);
      CHECK(by_default.reserved <= 2 * least_mib + (2 * least_mib > 128 ? 2 * least_mib : 128));
      CHECK(by_default.step_us <= 1.001 * off.step_us);
    }
}

/* Then a program runs in little more than it reserves with an allowance of nothing. */
static void check_in_little_memory(void step(void))
{
  for (int kind = 0; kind < 2; kind++) {
    cost least = run(step, 1, KINDS[kind], 1);
    double fraction = 1.05 * (double)least.reserved * MIB / (double)CAPACITY;
    double step_us = run(step, 0, KINDS[kind], fraction).step_us;
    printf("  in %zu MiB: step %.3f\n", least.reserved, step_us / least.step_us);
    CHECK(step_us < 1.05 * least.step_us);
  }
}

TEST(the_allowance_goes_first_when_memory_is_short)
{
  least_mib = 32;
  check_in_little_memory(fsdp_step);
  least_mib = 4, most_mib = 64;
  for (compute_streams = 1; compute_streams <= 2; compute_streams++)
    check_in_little_memory(pipeline_step);
}
