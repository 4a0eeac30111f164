/* Seeded random programs over several streams, every read checked.
 *
 *   random_reads [--seed S] [--programs N] [--unmarked]
 *
 * Each program draws its streams, how much memory there is, and then operations:
 * memory handed out and written, read late on other streams and marked in every
 * way there is, freed by whichever thread; streams that are destroyed; captures
 * that nobody announces. Memory is also written first by a stream that was ordered
 * after the owner's before the malloc. The programs are correct: reads wait for the
 * writes, and marks stand after the last read. So whatever a read finds is the
 * allocator's.
 *
 * The first thing that is wrong ends the run with status 1, and prints the seed of
 * its program: --seed S --programs 1 runs that one alone. Status 2: the run itself
 * could not be made. --unmarked leaves the marks out: then something should be wrong
 * soon. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "draw.h"
#include "program.h"

enum {
  MOST_BLOCKS = 24, /* of a thread */
  MOST_THREADS = 2,
  SHELF = 4,
};

typedef struct thread {
  uint64_t random;
  block blocks[MOST_BLOCKS];
  int count;
} thread;

static int threads_running;
static bool mortal;                /* the last stream is one that may be destroyed */
static pthread_mutex_t shelf_lock; /* guards blocks on their way to the other thread */
static block shelf[SHELF];
static int shelved;

_Noreturn void found(const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  printf("found: ");
  vprintf(format, arguments);
  va_end(arguments);
  printf("\nin program %llu (%d thread%s), at step %u; again: --seed %llu --programs 1\n",
         (unsigned long long)p.seed, threads_running, threads_running > 1 ? "s" : "",
         atomic_load(&p.step), (unsigned long long)p.seed);
  fflush(stdout);
  _exit(1); /* nothing is put in order: the state is not to be trusted */
}

/* ---- drawing ------------------------------------------------------------- */

static int draw(thread *t, int below)
{
  return (int)draw_below(&t->random, (uint64_t)below);
}

static bool chance(thread *t, int in)
{
  return draw(t, in) == 0;
}

/* From 512 bytes to 8 MiB, each power of two as likely as another. */
static size_t draw_size(thread *t)
{
  size_t power = (size_t)512 << draw(t, 14);
  return (power + draw64(&t->random) % power) / 4 * 4;
}

/* ---- random programs ------------------------------------------------------ */

static int draw_stream(thread *t)
{
  return draw(t, p.stream_count);
}

static block *draw_block(thread *t)
{
  return t->count ? &t->blocks[draw(t, t->count)] : NULL;
}

static unsigned draw_delay(thread *t)
{
  return chance(t, 2) ? 0 : 10 + (unsigned)draw(t, chance(t, 8) ? 400 : 100);
}

static void drop(thread *t, block *b)
{
  give(b);
  *b = t->blocks[--t->count];
}

static block *keep(thread *t, block b)
{
  if (!b.at) {
    while (t->count > MOST_BLOCKS / 4)
      drop(t, draw_block(t));
    return NULL;
  }
  if (chance(t, 4))
    machine_delay(handle(b.writer), draw_delay(t));
  write_block(&b);
  t->blocks[t->count++] = b;
  return &t->blocks[t->count - 1];
}

static void do_malloc(thread *t)
{
  if (t->count == MOST_BLOCKS)
    drop(t, draw_block(t));
  keep(t, take(draw_size(t), draw_stream(t)));
}

/* The marks there are, after a read. */
static void mark_somehow(thread *t, block *b, int reader)
{
  switch (draw(t, 8)) {
  case 0:
    note(b, reader);
    if (!p.unmarked)
      b->at_free |= 1u << reader;
    break;
  case 1: mark_event(b, reader, draw_stream(t)); break;
  case 2:
    if (chance(t, 2))
      mark_until_free(b, reader);
    else
      mark(b, reader, ESPER_USE_UNTIL_FREE);
    if (!p.unmarked)
      b->at_free |= 1u << reader;
    break;
  case 3: /* no mark: the owner waits, as programs did before */
    if (!p.unmarked)
      machine_wait(handle(b->owner), handle(reader));
    break;
  case 4:
    if (!p.unmarked)
      must(esper_free_after_all(p.core, b->at), "free_after_all");
    b->after_all = !p.unmarked;
    break;
  default: mark(b, reader, 0);
  }
}

/* A stream waits for another one, and is the first to write to what that one is given then. The
 * owner must have got no more work in between, so there is no other thread. */
static void do_malloc_behind(thread *t)
{
  int owner = draw_stream(t), writer = draw(t, p.stream_count - mortal);
  if (threads_running > 1)
    return;
  if (t->count == MOST_BLOCKS)
    drop(t, draw_block(t));
  machine_wait(handle(writer), handle(owner));
  block *b = keep(t, take_for(draw_size(t), owner, writer));
  if (b && writer != owner)
    mark_somehow(t, b, writer);
  if (b && chance(t, 4))
    drop(t, b);
}

static void do_read(thread *t)
{
  block *b = draw_block(t);
  int reader = draw_stream(t);
  if (!b || b->owner < 0)
    return;
  read_on(b, reader, draw_delay(t));
  if (reader != b->owner)
    mark_somehow(t, b, reader);
  if (chance(t, 3)) /* what is dropped at once is reused at once */
    drop(t, b);
}

/* Several blocks, read on one stream, one event for all of them. */
static void do_read_list(thread *t)
{
  const void *list[4];
  size_t count = 0;
  int reader = draw_stream(t);
  for (int i = 0; i < 4; i++) {
    block *b = draw_block(t);
    if (b && b->owner >= 0) {
      read_on(b, reader, i ? 0 : draw_delay(t));
      list[count++] = b->at + draw64(&t->random) % b->size;
    }
  }
  size_t marked = count;
  if (!p.unmarked)
    must(esper_record_use(p.core, list, count, p.streams[reader], 0, &marked), "record_use");
  if (marked != count)
    found("%zu of %zu live blocks were marked", marked, count);
}

/* Reads that an earlier record_stream covers. */
static void do_read_on(thread *t)
{
  block *b = draw_block(t);
  if (!b || b->owner < 0)
    return;
  for (int i = 0; i < p.stream_count; i++)
    if (b->after_all || b->at_free >> i & 1)
      read_on(b, i, draw_delay(t));
}

/* Part of a block, on its own stream. */
static void do_read_own(thread *t)
{
  const block *b = draw_block(t);
  if (!b || b->owner < 0)
    return;
  machine_wait(handle(b->owner), handle(b->writer));
  check_on(b, b->owner, draw64(&t->random) % b->size / 4 * 4);
}

/* The stream goes; another one, with its handle perhaps, comes. */
static void do_recycle_stream(thread *t)
{
  int last = p.stream_count - 1;
  if (!mortal)
    return;
  machine_stream_destroy(handle(last));
  for (int i = 0; i < t->count; i++) {
    t->blocks[i].at_free &= ~(1u << last);
    if (t->blocks[i].owner == last)
      t->blocks[i].owner = -1;
  }
  p.streams[last].handle = machine_stream_create();
}

/* Memory that is handed out, written and freed inside a capture, behind the
 * allocator's back, perhaps on a branch that was there before. The graph writes to it
 * whenever it runs. */
static void do_capture(thread *t)
{
  int stream = draw(t, MACHINE_STREAMS), branch = draw(t, MACHINE_STREAMS);
  if (threads_running > 1) /* others may be using the stream */
    return;
  machine_capture_begin(handle(stream));
  machine_wait(handle(branch), handle(stream));
  block inside = take_for(draw_size(t), stream, branch);
  write_block(&inside);
  mark(&inside, branch, 0);
  machine_wait(handle(stream), handle(branch));
  if (inside.at)
    machine_check(handle(stream), inside.at, 0, inside.size, inside.tag, atomic_load(&p.step));
  give(&inside);
  void *graph = machine_capture_end(handle(stream));
  if (!graph)
    found("a capture was invalidated");
  for (int i = draw(t, 4); i > 0; i--)
    do_malloc(t);
  machine_launch(graph, handle(stream));
}

static void do_exchange(thread *t)
{
  block *b = draw_block(t);
  pthread_mutex_lock(&shelf_lock);
  if (b && shelved < SHELF && threads_running > 1) {
    shelf[shelved++] = *b;
    *b = t->blocks[--t->count];
  } else if (shelved && t->count < MOST_BLOCKS) {
    t->blocks[t->count++] = shelf[--shelved];
  }
  pthread_mutex_unlock(&shelf_lock);
}

static void do_rest(thread *t)
{
  switch (draw(t, 5)) {
  case 0: do_recycle_stream(t); break;
  case 1: do_capture(t); break;
  case 2: esper_retire(p.core, 0); break;
  case 3: machine_pause(draw64(&t->random)); break;
  default:
    if (chance(t, 4))
      must(esper_empty_cache(p.core, 0, NULL), "empty_cache");
  }
}

static void *run_thread(void *argument)
{
  thread *t = argument;
  for (int left = 40 + draw(t, 80); left > 0; left--) {
    int kind = draw(t, 100);
    if (kind < 26)
      do_malloc(t);
    else if (kind < 32)
      do_malloc_behind(t);
    else if (kind < 60)
      do_read(t);
    else if (kind < 66)
      do_read_list(t);
    else if (kind < 71)
      do_read_on(t);
    else if (kind < 75)
      do_read_own(t);
    else if (kind < 80)
      machine_delay(handle(draw_stream(t)), 10 + (unsigned)draw(t, 150));
    else if (kind < 84)
      do_exchange(t);
    else if (kind < 95 && t->count)
      drop(t, draw_block(t));
    else if (kind >= 95)
      do_rest(t);
  }
  return NULL;
}

static void run_random(thread *maker)
{
  static const size_t LIMITS[] = {24, 44, 64, 128, 0};
  static const size_t ALLOWANCES[] = {0, 1, 4 * MIB, 32 * MIB, ESPER_ALLOWANCE_OFF};
  thread threads[MOST_THREADS];
  pthread_t other;
  threads_running = chance(maker, 4) ? 2 : 1;
  esper_segments segments = chance(maker, 2) ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_CLASSIC;
  size_t allowance = ALLOWANCES[draw(maker, 5)];
  program_begin(segments, allowance, LIMITS[draw(maker, 5)] * MIB);
  mortal = false;
  p.stream_count = 2 + draw(maker, MACHINE_STREAMS - 1);
  if (threads_running == 1 && chance(maker, 4)) {
    mortal = true;
    p.streams[p.stream_count++] = (esper_stream){machine_stream_create(), 0, 0};
  }
  for (int i = 0; i < threads_running; i++)
    threads[i] = (thread){.random = draw64(&maker->random)};
  if (threads_running > 1 && pthread_create(&other, NULL, run_thread, &threads[1])) {
    fputs("no thread can be made\n", stderr);
    _exit(2);
  }
  run_thread(&threads[0]);
  if (threads_running > 1)
    pthread_join(other, NULL);
  for (int i = 0; i < threads_running; i++)
    program_check(threads[i].blocks, threads[i].count);
  program_check(shelf, shelved);
  shelved = 0;
  if (mortal) {
    machine_stream_destroy(handle(p.stream_count - 1));
    machine_finish();
  }
  program_end();
}

/* ---- the run -------------------------------------------------------------- */

static double seconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **arguments)
{
  uint64_t first = 1, programs = 1000;
  for (int i = 1; i < count; i++) {
    const char *name = arguments[i];
    if (!strcmp(name, "--unmarked")) {
      p.unmarked = true;
      continue;
    }
    const char *value = ++i < count ? arguments[i] : "";
    char *rest = "";
    if (!strcmp(name, "--seed"))
      first = strtoull(value, &rest, 10);
    else if (!strcmp(name, "--programs"))
      programs = strtoull(value, &rest, 10);
    else
      rest = "?";
    if (*rest || !*value) {
      fprintf(stderr, "random_reads: what is %s %s?\n", name, value);
      return 2;
    }
  }
  machine_open();
  pthread_mutex_init(&shelf_lock, NULL);
  double start = seconds();
  for (uint64_t i = 0; i < programs; i++) {
    thread maker = {.random = first + i};
    p.seed = first + i;
    atomic_store(&p.step, 0);
    run_random(&maker);
  }
  printf("nothing is wrong in %llu programs, seeds from %llu: %llu blocks handed out, %llu "
         "refused, %llu reads checked, in %.1f s\n",
         (unsigned long long)programs, (unsigned long long)first,
         (unsigned long long)atomic_load(&p.handed_out),
         (unsigned long long)atomic_load(&p.refused), (unsigned long long)atomic_load(&p.checks),
         seconds() - start);
  return 0;
}
