/* How cost, metadata and host memory grow with the number of live blocks, over the
 * simulated device. growth.py builds, runs and draws it.
 *
 *   growth [--most BLOCKS] [--operations N] [--seed S] [--mapped]
 *
 * For 100, 1,000, ... up to BLOCKS live blocks (1,000,000), in a process of its own
 * each, prints one line:
 *
 *   live blocks, free ones, ns of a free and a malloc, metadata bytes, host bytes
 *   (resident, over an empty core), live bytes, reserved bytes
 *
 * The blocks are filled first; then N times (1,000,000) a block drawn at random is
 * freed and another size asked for in its place: 512 B to 64 KiB, each power of two
 * as likely as the next. The simulated device runs without its oracle, so what is
 * timed is the core. --mapped: on a device that can map pages. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../csrc/device/sim/sim.h"
#include "../csrc/esper_alloc.h"

enum { LEAST_LOG = 9, MOST_LOG = 16 };

static uint64_t state = 1;

static uint64_t draw(void)
{
  uint64_t x = state += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

static size_t draw_size(void)
{
  uint64_t x = draw();
  size_t base = (size_t)1 << (LEAST_LOG + x % (MOST_LOG - LEAST_LOG));
  return base + (x >> 8) % base;
}

static void must(esper_status status)
{
  if (status == ESPER_OK)
    return;
  fprintf(stderr, "growth: %s: %s\n", esper_status_name(status), esper_last_error());
  exit(1);
}

static double now_ns(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static long resident_bytes(void)
{
  long pages = 0, resident = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  if (!f)
    return 0;
  if (fscanf(f, "%ld %ld", &pages, &resident) != 2)
    resident = 0;
  fclose(f);
  return resident * sysconf(_SC_PAGESIZE);
}

/* Classic and mapped ones: the statistics count those of classic segments only. */
static size_t count_free(esper_core *core)
{
  esper_snapshot snapshot;
  must(esper_snapshot_take(core, 0, &snapshot));
  size_t count = 0;
  for (size_t i = 0; i < snapshot.block_count; i++)
    count += snapshot.blocks[i].state != ESPER_BLOCK_ALLOCATED;
  esper_snapshot_free(&snapshot);
  return count;
}

static void measure(size_t live, size_t operations, bool mapped)
{
  sim_options options = {.capacity = (size_t)1 << 42, .virtual_memory = mapped};
  sim *s = sim_create(&options);
  esper_core *core = NULL;
  void **blocks = calloc(live, sizeof *blocks);
  if (!s || !blocks)
    exit(1);
  memset(blocks, 1, live * sizeof *blocks); /* so that it is resident by now */
  must(esper_core_create(sim_driver(s), NULL, &core));
  esper_stream stream = {sim_stream_create(s, 0), 0, ESPER_STREAM_IMMORTAL};
  long before = resident_bytes();
  for (size_t i = 0; i < live; i++)
    must(esper_malloc(core, draw_size(), stream, &blocks[i]));
  sim_alive alive;
  sim_count_alive(s, 0, &alive);
  if (mapped && alive.pages == 0) {
    fprintf(stderr, "growth: --mapped: this core maps no pages\n");
    exit(1);
  }
  double begin = now_ns();
  for (size_t n = 0; n < operations; n++) {
    void **b = &blocks[draw() % live];
    must(esper_free(core, *b));
    must(esper_malloc(core, draw_size(), stream, b));
  }
  double took = (now_ns() - begin) / (double)operations;
  long after = resident_bytes();
  esper_counters counters;
  esper_stats stats;
  must(esper_get_counters(core, 0, &counters));
  must(esper_get_stats(core, 0, &stats));
  printf("%zu %zu %.1f %llu %ld %lld %lld\n", live, count_free(core), took,
         (unsigned long long)counters.metadata_bytes, after - before,
         (long long)stats.allocated_bytes[ESPER_ALL].current,
         (long long)stats.reserved_bytes[ESPER_ALL].current);
  fflush(stdout);
}

int main(int count, char **arguments)
{
  size_t most = 1000000, operations = 1000000;
  bool mapped = false;
  for (int i = 1; i < count; i++) {
    if (strcmp(arguments[i], "--mapped") == 0) {
      mapped = true;
      continue;
    }
    size_t *value = strcmp(arguments[i], "--most") == 0         ? &most
                    : strcmp(arguments[i], "--operations") == 0 ? &operations
                                                                : NULL;
    bool seed = strcmp(arguments[i], "--seed") == 0;
    if ((!value && !seed) || i + 1 == count) {
      fprintf(stderr, "usage: growth [--most BLOCKS] [--operations N] [--seed S] [--mapped]\n");
      return 2;
    }
    unsigned long long number = strtoull(arguments[++i], NULL, 10);
    if (seed)
      state = number;
    else
      *value = (size_t)number;
  }
  for (size_t live = 100; live <= most; live *= 10) {
    fflush(stdout);
    pid_t child = fork(); /* so that nothing of the last one is resident */
    if (child < 0)
      return 1;
    if (child == 0) {
      measure(live, operations, mapped);
      _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0)
      return 1;
  }
  return 0;
}
