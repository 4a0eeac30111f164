/* Seeded random programs over several streams, every read checked.
 *
 *   programs [--seed S] [--programs N] [--seconds T] [--without RULE] [--unmarked]
 *            [--episode NAME] [--list]
 *
 * Each program draws its streams, how much memory there is, and then operations:
 * memory handed out and written, read late on other streams and marked in every
 * way there is, freed by whichever thread; streams that are destroyed; captures
 * that nobody announces. Memory is also written first by a stream that was ordered
 * after the owner's before the malloc. The programs are correct: reads wait for the
 * writes, and marks stand after the last read. So whatever a read finds is the
 * allocator's.
 *
 * One program in four is an *episode* instead: the shortest way to need one of
 * the lifetime rules (docs/rules.md), among them work that waits for what is not
 * yet enqueued, and a driver that refuses.
 *
 * The first thing that is wrong ends the run with status 1, and prints the seed of
 * its program: --seed S --programs 1 runs that one alone. Status 2: the run itself
 * could not be made. --without RULE switches a rule off (a core built with
 * ESPER_RULE_SWITCHES): then something should be wrong soon. --unmarked leaves the
 * marks out, with the same purpose. --episode runs nothing but that one. --list
 * prints the rules. */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../../csrc/core/base/rules.h"
#include "machine.h"

#define MIB ((size_t)1 << 20)

enum {
  MOST_STREAMS = MACHINE_STREAMS + 1, /* the last may be destroyed */
  MOST_BLOCKS = 24,                   /* of a thread */
  MOST_THREADS = 2,
  SHELF = 4,
  LATE = 2500, /* microseconds: longer than the host needs for an episode */
};

typedef struct block {
  char *at;
  size_t size;
  int owner;        /* place of its stream; -1: that is gone */
  int writer;       /* place of the stream that wrote it */
  uint32_t tag;     /* of the pattern in it */
  unsigned at_free; /* bit i: a use on stream i until the free, which may read on */
  bool after_all;   /* any stream may read on */
} block;

typedef struct thread {
  uint64_t random;
  block blocks[MOST_BLOCKS];
  int count;
} thread;

static struct {
  uint64_t seed;
  const char *kind;
  int threads;
  esper_core *core;
  esper_stream streams[MOST_STREAMS];
  int stream_count;
  bool mortal; /* the last stream is one that may be destroyed */
  atomic_uint step, tag;
  pthread_mutex_t shelf_lock; /* blocks on their way to the other thread */
  block shelf[SHELF];
  int shelved;
} p; /* the program that is running */

static bool unmarked; /* the control: no marks at all */
static atomic_ullong handed_out, refused, checks;

/* ---- what is wrong ------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) static _Noreturn void found(const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  printf("found: ");
  vprintf(format, arguments);
  va_end(arguments);
  printf("\nin program %llu (%s, %d thread%s), at step %u; again: --seed %llu --programs 1\n",
         (unsigned long long)p.seed, p.kind, p.threads, p.threads > 1 ? "s" : "",
         atomic_load(&p.step), (unsigned long long)p.seed);
  fflush(stdout);
  _exit(1); /* nothing is put in order: the state is not to be trusted */
}

void machine_noticed(const char *what)
{
  found("%s", what);
}

static void must(esper_status status, const char *what)
{
  if (status != ESPER_OK)
    found("%s: %s: %s", what, esper_status_name(status), esper_last_error());
}

/* ---- a driver that refuses, and notices ----------------------------------- */

static const esper_driver *true_driver;
static esper_driver driver;
static atomic_bool refuses_queries;
static atomic_int patience = -1; /* waits for what never completes; -1: it may well complete */

static esper_status query_or_refuse(void *self, int device, void *event)
{
  if (atomic_load(&refuses_queries))
    return ESPER_DEVICE_ERROR;
  return true_driver->event_query(self, device, event);
}

static esper_status synchronize_or_find(void *self, int device, void *event)
{
  if (atomic_load(&patience) >= 0)
    found("the host waits for what will never complete");
  return true_driver->event_synchronize(self, device, event);
}

static esper_status wait_or_find(void *self, int device, void *event, unsigned microseconds)
{
  if (atomic_load(&patience) >= 0 && atomic_fetch_sub(&patience, 1) == 0)
    found("the host waits again and again for what will never complete");
  return true_driver->event_wait(self, device, event, microseconds);
}

/* ---- drawing ------------------------------------------------------------- */

static uint64_t draw64(thread *t)
{
  uint64_t x = t->random += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

static int draw(thread *t, int below)
{
  return (int)(draw64(t) % (uint64_t)below);
}

static bool chance(thread *t, int in)
{
  return draw(t, in) == 0;
}

/* From 512 bytes to 8 MiB, each power of two as likely as another. */
static size_t draw_size(thread *t)
{
  size_t power = (size_t)512 << draw(t, 14);
  return (power + draw64(t) % power) / 4 * 4;
}

/* ---- memory -------------------------------------------------------------- */

static void *handle(int stream)
{
  return p.streams[stream].handle;
}

/* Memory of `owner`, not yet written. `at` is NULL where there is none. `writer`, the first to use
 * it, is that stream, or was ordered after it before the malloc. */
static block take_for(size_t size, int owner, int writer)
{
  block b = {.size = size, .owner = owner, .writer = writer};
  void *at = NULL;
  esper_status status = esper_malloc(p.core, size, p.streams[owner], &at);
  atomic_fetch_add(&p.step, 1);
  if (status == ESPER_OUT_OF_MEMORY) {
    atomic_fetch_add(&refused, 1);
    return b;
  }
  must(status, "malloc");
  atomic_fetch_add(&handed_out, 1);
  machine_owner_begin(at, size, handle(writer));
  b.at = at;
  return b;
}

static block take(size_t size, int stream)
{
  return take_for(size, stream, stream);
}

static void write_block(block *b)
{
  b->tag = atomic_fetch_add(&p.tag, 1) + 1;
  if (b->at)
    machine_write(handle(b->writer), b->at, b->size, b->tag);
}

/* The same, late. */
static void write_late(block *b)
{
  machine_delay(handle(b->owner), LATE);
  write_block(b);
}

static block take_written(size_t size, int stream)
{
  block b = take(size, stream);
  write_block(&b);
  return b;
}

static void check_on(const block *b, int reader, size_t begin)
{
  if (!b->at)
    return;
  atomic_fetch_add(&checks, 1);
  machine_check(handle(reader), b->at, begin, b->size, b->tag, atomic_fetch_add(&p.step, 1));
}

/* A read on another stream, after `delay` microseconds. */
static void read_on(const block *b, int reader, unsigned delay)
{
  if (!b->at)
    return;
  machine_wait(handle(reader), handle(b->writer));
  if (delay)
    machine_delay(handle(reader), delay);
  check_on(b, reader, 0);
}

static void give(block *b)
{
  if (!b->at)
    return;
  machine_owner_end(b->at);
  must(esper_free(p.core, b->at), "free");
  b->at = NULL;
}

/* ---- marks --------------------------------------------------------------- */

static void mark(const block *b, int reader, unsigned flags)
{
  const void *at = b->at;
  if (at && !unmarked)
    must(esper_record_use(p.core, &at, 1, p.streams[reader], flags, NULL), "record_use");
}

/* As an observer of what is used says it. */
static void note(const block *b, int reader)
{
  const void *at = b->at;
  if (at && !unmarked)
    must(esper_note_use(p.core, &at, 1, p.streams[reader]), "note_use");
}

static void mark_event(const block *b, int reader, int other)
{
  const void *at = b->at;
  if (!at || unmarked)
    return;
  void *event = machine_event(handle(reader));
  must(esper_record_use_event(p.core, &at, 1, event, 0, NULL), "record_use_event");
  machine_event_again(event, handle(other)); /* it is the program's own */
  machine_event_done(event);
}

static void mark_until_free(const block *b, int reader)
{
  if (b->at && !unmarked)
    must(esper_record_stream(p.core, b->at, p.streams[reader]), "record_stream");
}

static void read_and_mark(const block *b, int reader, unsigned delay)
{
  read_on(b, reader, delay);
  mark(b, reader, 0);
}

/* ---- a program's beginning and end ---------------------------------------- */

/* `mib`: what the core may take from the device; 0: no limit. */
static void begin_with(esper_segments segments, size_t allowance, size_t mib)
{
  esper_config config = {.allowance = allowance,
                         .segments = segments,
                         .large_segment_size = 20 * MIB}; /* of pages, too */
  true_driver = machine_begin(p.seed);
  driver = *true_driver;
  driver.event_query = query_or_refuse;
  driver.event_synchronize = synchronize_or_find;
  driver.event_wait = wait_or_find;
  must(esper_core_create(&driver, &config, &p.core), "core_create");
  for (int i = 0; i < MACHINE_STREAMS; i++)
    p.streams[i] = (esper_stream){machine_stream(i), 0, ESPER_STREAM_IMMORTAL};
  p.stream_count = MACHINE_STREAMS;
  p.mortal = false;
  size_t available = 0, total = 0;
  must(esper_memory_info(p.core, 0, &available, &total), "memory_info");
  /* Half a MiB more, since a fraction is no whole number of bytes. */
  if (mib)
    must(esper_set_memory_fraction(p.core, 0, ((double)mib + 0.5) * (double)MIB / (double)total),
         "set_memory_fraction");
}

/* Most episodes count on what shares a segment. */
static void begin(size_t mib)
{
  begin_with(ESPER_SEGMENTS_CLASSIC, 0, mib);
}

static void check_errors(void)
{
  if (!machine_finish())
    found("streams wait for each other for ever");
  machine_error wrong = machine_errors();
  if (wrong.count)
    found("%u words are wrong: the first, word %u read at step %u, is %08x and not %08x",
          wrong.count, wrong.word, wrong.step, wrong.seen, wrong.wanted);
}

static void check_core(void)
{
  if (!esper_core_is_valid(p.core))
    found("the core is not valid");
}

/* Each block of the program is looked at once more, then given back. */
static void end_of(block *blocks, int count)
{
  check_errors();
  for (int i = 0; i < count; i++)
    if (blocks[i].owner >= 0)
      check_on(&blocks[i], blocks[i].owner, 0);
  check_errors();
  check_core();
  for (int i = 0; i < count; i++)
    give(&blocks[i]);
}

static void end(void)
{
  esper_retire(p.core, 0);
  must(esper_empty_cache(p.core, 0, NULL), "empty_cache");
  check_core();
  esper_core_destroy(p.core);
  p.core = NULL;
  machine_end();
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
    if (!unmarked)
      b->at_free |= 1u << reader;
    break;
  case 1: mark_event(b, reader, draw_stream(t)); break;
  case 2:
    if (chance(t, 2))
      mark_until_free(b, reader);
    else
      mark(b, reader, ESPER_USE_UNTIL_FREE);
    if (!unmarked)
      b->at_free |= 1u << reader;
    break;
  case 3: /* no mark: the owner waits, as programs did before */
    if (!unmarked)
      machine_wait(handle(b->owner), handle(reader));
    break;
  case 4:
    if (!unmarked)
      must(esper_free_after_all(p.core, b->at), "free_after_all");
    b->after_all = !unmarked;
    break;
  default: mark(b, reader, 0);
  }
}

/* A stream waits for another one, and is the first to write to what that one is given then. The
 * owner must have got no more work in between, so there is no other thread. */
static void do_malloc_behind(thread *t)
{
  int owner = draw_stream(t), writer = draw(t, p.stream_count - p.mortal);
  if (p.threads > 1)
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
      list[count++] = b->at + draw64(t) % b->size;
    }
  }
  size_t marked = count;
  if (!unmarked)
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
  check_on(b, b->owner, draw64(t) % b->size / 4 * 4);
}

/* The stream goes; another one, with its handle perhaps, comes. */
static void do_recycle_stream(thread *t)
{
  int last = p.stream_count - 1;
  if (!p.mortal)
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
  if (p.threads > 1) /* others may be using the stream */
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
  pthread_mutex_lock(&p.shelf_lock);
  if (b && p.shelved < SHELF && p.threads > 1) {
    p.shelf[p.shelved++] = *b;
    *b = t->blocks[--t->count];
  } else if (p.shelved && t->count < MOST_BLOCKS) {
    t->blocks[t->count++] = p.shelf[--p.shelved];
  }
  pthread_mutex_unlock(&p.shelf_lock);
}

static void do_rest(thread *t)
{
  switch (draw(t, 5)) {
  case 0: do_recycle_stream(t); break;
  case 1: do_capture(t); break;
  case 2: esper_retire(p.core, 0); break;
  case 3: machine_pause(draw64(t)); break;
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
  p.kind = "random";
  p.threads = chance(maker, 4) ? 2 : 1;
  esper_segments segments = chance(maker, 2) ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_CLASSIC;
  begin_with(segments, ALLOWANCES[draw(maker, 5)], LIMITS[draw(maker, 5)]);
  p.stream_count = 2 + draw(maker, MACHINE_STREAMS - 1);
  if (p.threads == 1 && chance(maker, 4)) {
    p.mortal = true;
    p.streams[p.stream_count++] = (esper_stream){machine_stream_create(), 0, 0};
  }
  for (int i = 0; i < p.threads; i++)
    threads[i] = (thread){.random = draw64(maker)};
  if (p.threads > 1 && pthread_create(&other, NULL, run_thread, &threads[1])) {
    fputs("no thread can be made\n", stderr);
    _exit(2);
  }
  run_thread(&threads[0]);
  if (p.threads > 1)
    pthread_join(other, NULL);
  for (int i = 0; i < p.threads; i++)
    end_of(threads[i].blocks, threads[i].count);
  end_of(p.shelf, p.shelved);
  p.shelved = 0;
  if (p.mortal) {
    machine_stream_destroy(handle(p.stream_count - 1));
    machine_finish();
  }
  end();
}

/* ---- episodes ------------------------------------------------------------- */

/* Streams by role: R owns and wants memory, S and T read, O is another one.
 * Sizes in MiB, each of which has a segment of its own. */
enum { R, S, T, O };
enum { X = 12, Y = 14, Z = 16 };

/* An event of the core's on `stream`, which covers all that is there. */
static void record_something(int stream, int other)
{
  block b = take_written(512, other);
  read_and_mark(&b, stream, 0);
  give(&b);
}

static void drain_both(int one, int other)
{
  machine_sync(handle(one));
  machine_sync(handle(other));
  esper_retire(p.core, 0);
}

enum { RACE_MARKS = 400 };
static atomic_int racing;

static void *race(void *argument)
{
  block *blocks = argument;
  atomic_fetch_add(&racing, 1);
  while (atomic_load(&racing) < 2)
    ;
  for (int i = 0; i < RACE_MARKS; i++)
    mark(&blocks[i], S, 0);
  return NULL;
}

/* 1a: two threads record on one stream. */
static void two_threads_mark(thread *t)
{
  (void)t;
  static block blocks[2 * RACE_MARKS];
  pthread_t other;
  begin(0);
  for (int i = 0; i < 2 * RACE_MARKS; i++)
    blocks[i] = take_written(512, R);
  machine_delay(handle(S), LATE);
  atomic_store(&racing, 0);
  if (pthread_create(&other, NULL, race, blocks)) {
    fputs("no thread can be made\n", stderr);
    _exit(2);
  }
  race(blocks + RACE_MARKS);
  pthread_join(other, NULL);
  check_core();
  end_of(blocks, 2 * RACE_MARKS);
}

/* 2: S still reads what R gets again, and T, which was ordered after R before, writes there at
 * once. */
static void follower_writes_first(thread *t)
{
  begin(chance(t, 2) ? X : 64); /* the host waits, or memory grows */
  block x = take_written(X * MIB, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  machine_wait(handle(T), handle(R));
  x = take_for(X * MIB, R, T);
  write_block(&x);
  end_of(&x, 1);
}

/* 3: the event was recorded before the free. */
static void stale_owner_order(thread *t)
{
  (void)t;
  begin(X + 2);
  block x = take(X * MIB, O);
  record_something(O, R);
  drain_both(R, O);
  write_late(&x);
  give(&x);
  esper_retire(p.core, 0);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
}

/* 3b: the same where the block was handed out and freed without a lock. */
static void stale_cache(thread *t)
{
  (void)t;
  begin(X + 2);
  block x = take(X * MIB, O);
  give(&x);
  record_something(O, R);
  drain_both(R, O);
  x = take(X * MIB, O);
  write_late(&x);
  give(&x);
  esper_retire(p.core, 0);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
}

/* 4l: S still reads what R gets again. */
static void read_in_cache(thread *t)
{
  (void)t;
  begin(X);
  block x = take(X * MIB, R);
  give(&x);
  x = take_written(X * MIB, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
}

/* 4c: neighbours, one of them freed later. */
static void merged_stamp(thread *t)
{
  (void)t;
  begin(20 + 2);
  block a = take(9 * MIB, R), b = take(9 * MIB, R);
  give(&a);
  record_something(R, O);
  drain_both(O, R);
  write_late(&b);
  give(&b);
  a = take_written(18 * MIB, O);
  end_of(&a, 1);
}

/* 4d */
static void borrower(thread *t)
{
  (void)t;
  begin(20);
  block a = take_written(9 * MIB, R), b = take_written(9 * MIB, R);
  give(&a);
  machine_sync(handle(R));
  a = take(9 * MIB, T);
  write_late(&a);
  give(&a);
  block both[] = {take_written(9 * MIB, R), b};
  end_of(both, 2);
}

/* 4e */
static void lent_too_early(thread *t)
{
  (void)t;
  begin(X);
  block x = take(X * MIB, R);
  write_late(&x);
  give(&x);
  x = take_written(X * MIB, S);
  end_of(&x, 1);
}

/* 4f and 4i: R is captured, so that the device is not waited for. Freeing memory may
 * wait for it, so S is looked at before. */
static void given_back_of(bool mapped, const char *complaint)
{
  begin_with(mapped ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_CLASSIC, 0, 64);
  block x = take_written(X * MIB, R);
  machine_sync(handle(R));
  read_and_mark(&x, S, 8 * LATE);
  give(&x);
  machine_capture_begin(handle(R));
  bool still_read = machine_is_busy(handle(S)) && !unmarked;
  must(esper_empty_cache(p.core, 0, NULL), "empty_cache");
  esper_stats stats;
  must(esper_get_stats(p.core, 0, &stats), "get_stats");
  if (still_read && stats.reserved_bytes[ESPER_ALL].current != (int64_t)(X * MIB))
    found("%s", complaint);
  if (!machine_capture_end(handle(R)))
    found("a capture was invalidated");
  end_of(NULL, 0);
}

static void given_back(thread *t)
{
  (void)t;
  given_back_of(false, "memory that is still read was given back to the driver");
}

static void unmapped(thread *t)
{
  (void)t;
  given_back_of(true, "pages that are still read were unmapped");
}

/* Pages of 20 MiB of one stream, every other one of which is written late and then
 * free; nothing more is to be had. */
static void scatter(block *b, int owner)
{
  begin_with(ESPER_SEGMENTS_MAPPED, 0, 80);
  for (int i = 0; i < 4; i++)
    b[i] = take_written(20 * MIB, owner);
  write_late(&b[0]);
  write_late(&b[2]);
  give(&b[0]);
  give(&b[2]);
}

/* 4j: before the request is refused the host waits. */
static void lent_pages(thread *t)
{
  (void)t;
  block b[4];
  scatter(b, S);
  b[0] = take_written(40 * MIB, R);
  end_of(b, 4);
}

/* 4k: R takes a part of its pages at another address, T the rest. */
static void moved_pages(thread *t)
{
  (void)t;
  block b[4];
  scatter(b, R);
  b[0] = take_written(22 * MIB, R);
  b[2] = take_written(16 * MIB, T);
  end_of(b, 4);
}

static esper_counters counters_now(void)
{
  esper_counters counters;
  must(esper_get_counters(p.core, 0, &counters), "get_counters");
  return counters;
}

static void most_uses(uint64_t most)
{
  uint64_t pending = counters_now().uses_pending;
  if (pending > most)
    found("a block has %llu uses, and %llu would do", (unsigned long long)pending,
          (unsigned long long)most);
}

/* 5a */
static void marks_in_a_loop(thread *t)
{
  (void)t;
  begin(0);
  block x = take_written(X * MIB, R);
  for (int i = 0; i < 10; i++) {
    read_and_mark(&x, S, 100);
    mark_until_free(&x, T);
  }
  most_uses(2);
  end_of(&x, 1);
}

/* 5c */
static void uses_that_are_over(thread *t)
{
  (void)t;
  begin(0);
  block x = take_written(X * MIB, R);
  for (int reader = S; reader <= T; reader++) {
    read_and_mark(&x, reader, 0);
    machine_sync(handle(reader));
  }
  esper_retire(p.core, 0);
  read_and_mark(&x, O, LATE);
  most_uses(1);
  end_of(&x, 1);
}

/* 5b: the first mark has completed, but nobody asked. */
static void later_use(thread *t)
{
  (void)t;
  begin(X);
  block x = take_written(X * MIB, R);
  read_and_mark(&x, S, 0);
  machine_sync(handle(R));
  machine_sync(handle(S));
  read_and_mark(&x, S, LATE);
  give(&x);
  esper_retire(p.core, 0);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
}

/* 5d: S reads again after the mark, as backward does. */
static void later_read(thread *t)
{
  (void)t;
  begin(X);
  block x = take_written(X * MIB, R);
  read_on(&x, S, 0);
  mark(&x, S, ESPER_USE_UNTIL_FREE);
  read_on(&x, S, LATE);
  give(&x);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
}

/* 6a: the event that stands for S's use must not come to stand for T's. */
static void event_used_again(thread *t)
{
  (void)t;
  begin(X + Y);
  block b[] = {take_written(X * MIB, R), take_written(Y * MIB, R)};
  read_and_mark(&b[0], S, LATE);
  read_and_mark(&b[1], T, 0);
  give(&b[0]);
  b[0] = take_written(X * MIB, R);
  end_of(b, 2);
}

/* 3c: R waits for S, which reads late, after the free. O wants the memory before that. */
static void late_wait(thread *t)
{
  (void)t;
  begin(X);
  block x = take_written(X * MIB, R);
  read_on(&x, S, LATE);
  machine_sync(handle(R));
  give(&x);
  block y = take_written(X * MIB, O);
  machine_wait(handle(R), handle(S));
  end_of(&y, 1);
}

/* 6b */
static void refused_queries(thread *t)
{
  (void)t;
  begin(X);
  block x = take_written(X * MIB, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  atomic_store(&refuses_queries, true);
  esper_retire(p.core, 0);
  x = take_written(X * MIB, R);
  atomic_store(&refuses_queries, false);
  end_of(&x, 1);
}

/* 7a: a mark, and the free of what was marked, while the reader is captured. */
static void mark_in_a_capture(thread *t)
{
  (void)t;
  begin(4 * X);
  block x = take_written(X * MIB, R), y = take_written(X * MIB, R);
  machine_sync(handle(R));
  mark_until_free(&y, S);
  machine_capture_begin(handle(S));
  check_on(&x, S, 0);
  mark(&x, S, 0);
  give(&x);
  give(&y);
  esper_retire(p.core, 0);
  block b[] = {take_written(X * MIB, R), take_written(X * MIB, R)};
  if (!machine_capture_end(handle(S)))
    found("a capture was invalidated");
  end_of(b, 2);
}

/* 7f: a mark while another stream is captured. */
static void mark_beside_a_capture(thread *t)
{
  (void)t;
  begin(X + 2);
  block x = take_written(X * MIB, R), known = take(512, O);
  give(&known); /* the core has met O */
  machine_capture_begin(handle(O));
  read_and_mark(&x, S, LATE);
  give(&x);
  x = take_written(X * MIB, R);
  if (!machine_capture_end(handle(O)))
    found("a capture was invalidated");
  end_of(&x, 1);
}

/* 7b: what a graph writes is nobody else's. */
static void memory_of_a_capture(thread *t)
{
  (void)t;
  begin(64);
  block x = take_written(X * MIB, R);
  give(&x);
  machine_capture_begin(handle(R));
  x = take_written(X * MIB, R);
  const char *inside = x.at;
  give(&x);
  void *graph = machine_capture_end(handle(R));
  if (!graph)
    found("a capture was invalidated");
  x = take_written(X * MIB, R);
  if (inside && x.at == inside)
    found("memory that a graph writes was handed out outside it");
  machine_launch(graph, handle(R));
  end_of(&x, 1);
}

/* A pool for graphs, as PyTorch's captures have one: all that is asked for while
 * it is open comes from it. */
enum { POOL = 7 };

static int any_stream(void *context, void *stream)
{
  (void)context, (void)stream;
  return 1;
}

static void open_pool(void)
{
  must(esper_pool_begin(p.core, 0, POOL, 0, any_stream, NULL), "pool_begin");
}

static void close_pool(void)
{
  must(esper_pool_end(p.core, 0, POOL, 0, NULL), "pool_end");
}

static void release_pool(int references)
{
  while (references--)
    must(esper_pool_release(p.core, 0, POOL, 0), "pool_release");
}

/* What was captured on R runs on S, which is not behind R's earlier work. */
static void launch_elsewhere(void)
{
  void *graph = machine_capture_end(handle(R));
  if (!graph)
    found("a capture was invalidated");
  machine_launch(graph, handle(S));
}

/* 7c: R still writes what was freed to the pool before. */
static void pool_not_waited_for(thread *t)
{
  (void)t;
  begin(64);
  open_pool();
  block x = take(X * MIB, R);
  write_late(&x);
  give(&x);
  close_pool();
  open_pool();
  machine_capture_begin(handle(R));
  x = take_written(X * MIB, R);
  launch_elsewhere();
  close_pool();
  end_of(&x, 1);
  release_pool(2);
}

static block take_from(esper_pool *pool, size_t size)
{
  block b = {.size = size, .owner = R, .writer = R};
  void *at = NULL;
  must(esper_malloc_from(p.core, pool, size, p.streams[R], &at), "malloc_from");
  machine_owner_begin(at, size, handle(R));
  b.at = at;
  return b;
}

/* 4a and 4h: S reads what was one block; the checkpoint cuts it. */
static void checkpoint_of_what_is_read(thread *t)
{
  begin(64);
  esper_pool *pool;
  esper_checkpoint *checkpoint;
  esper_checkpoint_delta delta;
  int front = chance(t, 2);
  must(esper_pool_create(p.core, 0, POOL, 0, &pool), "pool_create");
  block b[] = {take_from(pool, 9 * MIB), take_from(pool, 9 * MIB)};
  void *kept = b[!front].at;
  give(&b[front]);
  must(esper_checkpoint_take(p.core, 0, POOL, 0, &checkpoint), "checkpoint_take");
  give(&b[!front]);
  block whole = take_from(pool, 20 * MIB);
  write_block(&whole);
  read_and_mark(&whole, S, LATE);
  give(&whole);
  must(esper_checkpoint_restore(p.core, checkpoint, &delta), "checkpoint_restore");
  must(esper_free(p.core, kept), "free");
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
  for (int i = 0; i < 2; i++) {
    b[i] = take_from(pool, 9 * MIB);
    write_block(&b[i]);
  }
  end_of(b, 2);
  release_pool(1);
}

/* 4b: two blocks, one of which S reads and the other T; the checkpoint makes them one again. */
static void checkpoint_of_what_is_whole(thread *t)
{
  begin(64);
  esper_pool *pool;
  esper_checkpoint *checkpoint;
  esper_checkpoint_delta delta;
  int late = chance(t, 2);
  must(esper_pool_create(p.core, 0, POOL, 0, &pool), "pool_create");
  block whole = take_from(pool, 20 * MIB);
  void *kept = whole.at;
  must(esper_checkpoint_take(p.core, 0, POOL, 0, &checkpoint), "checkpoint_take");
  give(&whole);
  block b[] = {take_from(pool, 9 * MIB), take_from(pool, 9 * MIB)};
  for (int i = 0; i < 2; i++) {
    write_block(&b[i]);
    read_and_mark(&b[i], i ? T : S, i == late ? LATE : 0);
  }
  for (int i = 0; i < 2; i++)
    give(&b[i]);
  must(esper_checkpoint_restore(p.core, checkpoint, &delta), "checkpoint_restore");
  must(esper_free(p.core, kept), "free");
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
  whole = take_from(pool, 20 * MIB);
  write_block(&whole);
  end_of(&whole, 1);
  release_pool(1);
}

/* 7d: R still writes what is freed to the pool while it is captured. */
static void freed_while_captured(thread *t)
{
  (void)t;
  begin(64);
  open_pool();
  block x = take(X * MIB, R), y = take(Y * MIB, R);
  give(&y);
  close_pool();
  open_pool();
  write_late(&x);
  machine_capture_begin(handle(R));
  y = take_written(Y * MIB, R); /* the memory is the capture's from here */
  give(&x);
  x = take_written(X * MIB, R);
  launch_elsewhere();
  close_pool();
  block b[] = {x, y};
  end_of(b, 2);
  release_pool(2);
}

/* 7e */
static void memory_of_a_graph(thread *t)
{
  (void)t;
  begin(64);
  open_pool();
  machine_capture_begin(handle(R));
  block x = take_written(X * MIB, R);
  give(&x);
  launch_elsewhere();
  close_pool();
  must(esper_empty_cache(p.core, 0, NULL), "empty_cache");
  esper_stats stats;
  must(esper_get_stats(p.core, 0, &stats), "get_stats");
  if (stats.reserved_bytes[ESPER_ALL].current < (int64_t)(X * MIB))
    found("memory that a graph may touch was given back");
  end_of(NULL, 0);
  release_pool(1);
}

/* What was captured on R runs there. */
static void launch_captured(void)
{
  void *graph = machine_capture_end(handle(R));
  if (!graph)
    found("a capture was invalidated");
  machine_launch(graph, handle(R));
}

/* 7g: in the graph, S reads x late. */
static void captured_use(thread *t)
{
  (void)t;
  begin(64);
  machine_capture_begin(handle(R));
  block x = take_written(X * MIB, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  x = take_written(X * MIB, R);
  machine_wait(handle(R), handle(S));
  launch_captured();
  end_of(&x, 1);
}

/* 7g: T, a branch since before the malloc, is the first to write, while S reads x late. */
static void captured_follower(thread *t)
{
  (void)t;
  begin(64);
  machine_capture_begin(handle(R));
  block x = take_written(X * MIB, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  machine_wait(handle(T), handle(R));
  x = take_for(X * MIB, R, T);
  write_block(&x);
  mark(&x, T, 0);
  machine_wait(handle(R), handle(S));
  machine_wait(handle(R), handle(T));
  launch_captured();
  end_of(&x, 1);
}

/* 3c: in the graph, O reads late what S frees, and S waits for that later than R for S. */
static void captured_late_wait(thread *t)
{
  (void)t;
  begin(64);
  machine_capture_begin(handle(R));
  machine_wait(handle(S), handle(R));
  block x = take_written(X * MIB, S);
  read_on(&x, O, LATE);
  give(&x);
  machine_wait(handle(R), handle(S));
  block b[] = {take_written(X * MIB, R), {0}};
  machine_wait(handle(S), handle(O));
  b[1] = take_written(X * MIB, S);
  machine_wait(handle(R), handle(S));
  launch_captured();
  end_of(b, 2);
}

/* 7h: O, which is not captured, reads late what the capture was given. */
static void read_outside(thread *t)
{
  (void)t;
  begin(64);
  machine_capture_begin(handle(R));
  block x = take(X * MIB, R);
  x.tag = atomic_fetch_add(&p.tag, 1) + 1;
  if (x.at)
    machine_write(handle(O), x.at, x.size, x.tag);
  machine_delay(handle(O), LATE);
  check_on(&x, O, 0);
  mark(&x, O, 0);
  give(&x);
  x = take_written(X * MIB, R);
  launch_captured();
  end_of(&x, 1);
}

static int mortal_stream(void)
{
  p.streams[p.stream_count] = (esper_stream){machine_stream_create(), 0, 0};
  return p.stream_count++;
}

enum { STAND_INS = 8 };

/* Streams until one has the handle of `mortal`, which was destroyed, or there are enough. */
static int replace_stream(int mortal, void *others[STAND_INS])
{
  int count = 0;
  while (count < STAND_INS) {
    others[count++] = machine_stream_create();
    if (others[count - 1] == handle(mortal))
      break;
  }
  return count;
}

static void end_with(block *x, void *others[STAND_INS], int count)
{
  end_of(x, 1);
  while (count)
    machine_stream_destroy(others[--count]);
  machine_finish();
}

/* 9a, 9b: the reader is gone; in its place, with its handle, may be another. */
static void reader_is_gone(thread *t, bool replaced)
{
  (void)t;
  begin(X);
  int mortal = mortal_stream();
  void *others[STAND_INS];
  block x = take_written(X * MIB, R);
  mark_until_free(&x, mortal);
  read_on(&x, mortal, LATE);
  machine_stream_destroy(handle(mortal));
  int count = replaced ? replace_stream(mortal, others) : 0;
  give(&x);
  x = take_written(X * MIB, R);
  end_with(&x, others, count);
}

/* 9c: who wrote the memory last is gone, and still at work; what has its handle asks for
 * as much. */
static void replaced_owner(thread *t)
{
  (void)t;
  begin(64);
  int mortal = mortal_stream();
  void *others[STAND_INS];
  block x = take(X * MIB, mortal);
  write_late(&x);
  give(&x);
  machine_stream_destroy(handle(mortal));
  int count = replace_stream(mortal, others);
  p.streams[mortal].handle = others[count - 1];
  x = take_written(X * MIB, mortal);
  machine_delay(handle(mortal), 2 * LATE);
  check_on(&x, mortal, 0);
  end_with(&x, others, count);
}

static void destroyed_reader(thread *t)
{
  reader_is_gone(t, false);
}

static void replaced_reader(thread *t)
{
  reader_is_gone(t, true);
}

/* 2: S waits for what R does after its next malloc. */
static void rendezvous(thread *t)
{
  begin(64);
  block x = take_written(X * MIB, R);
  machine_wait(handle(S), handle(R));
  machine_stall(handle(S));
  check_on(&x, S, 0);
  if (chance(t, 2))
    mark_until_free(&x, S);
  else
    mark(&x, S, 0);
  give(&x);
  x = take_written(X * MIB, R);
  machine_let_go(handle(R));
  end_of(&x, 1);
}

/* 4e: S, which owned the memory, waits for what R does next. */
static void rendezvous_of_the_owner(thread *t)
{
  (void)t;
  begin(64);
  block x = take(X * MIB, S);
  machine_stall(handle(S));
  write_block(&x);
  give(&x);
  x = take_written(X * MIB, R);
  machine_let_go(handle(R));
  end_of(&x, 1);
}

static double seconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* 10a and 10b: the host is held back by S, which waits for what the host has yet to enqueue. It
 * gives up, and does not try S again at once. A wait in vain takes a second on a GPU, so this is
 * rare. */
static void held_back_in_vain(thread *t)
{
  begin_with(ESPER_SEGMENTS_CLASSIC, 1, 0);
  block b[] = {take_written(X * MIB, R), take_written(X * MIB, R), take_written(X * MIB, R)};
  machine_wait(handle(S), handle(R));
  machine_stall(handle(S));
  for (int i = 0; i < 3; i++) {
    check_on(&b[i], S, 0);
    if (chance(t, 2))
      mark_until_free(&b[i], S);
    else
      mark(&b[i], S, 0);
    give(&b[i]);
  }
  atomic_store(&patience, 500); /* five times what a wait in vain takes */
  b[0] = take_written(X * MIB, R);
  double given_up = seconds();
  b[1] = take_written(X * MIB, R);
  bool at_once = seconds() - given_up < 0.3; /* a stream is left alone for 0.4 s at least */
  atomic_store(&patience, -1);
  esper_counters counters = counters_now();
  if (at_once && counters.held_back > 1)
    found("the host was held back again by a stream that it had waited for in vain");
  machine_let_go(handle(R));
  end_of(b, 2);
}

/* The host is held back, so that three blocks serve for many. */
static void held_back(thread *t)
{
  enum { ROUNDS = 8 };
  (void)t;
  begin_with(ESPER_SEGMENTS_CLASSIC, 1, 0);
  for (int i = 0; i < ROUNDS; i++) {
    block x = take_written(X * MIB, R);
    read_and_mark(&x, S, LATE / 5);
    give(&x);
  }
  esper_stats stats;
  must(esper_get_stats(p.core, 0, &stats), "get_stats");
  int64_t most = stats.reserved_bytes[ESPER_ALL].peak / (int64_t)(X * MIB);
  if (most > 3 && !counters_now().held_back_in_vain)
    found("%lld blocks were pending or live at a time, and three would do", (long long)most);
  end_of(NULL, 0);
}

/* 7j: the graph that R captured reads R's x, and runs on T. */
static void graph_reads_elsewhere(thread *t)
{
  (void)t;
  begin(64);
  block x = take_written(X * MIB, R);
  open_pool();
  machine_capture_begin(handle(R));
  machine_delay(handle(R), LATE);
  check_on(&x, R, 0);
  note(&x, R);
  void *graph = machine_capture_end(handle(R));
  if (!graph)
    found("a capture was invalidated");
  close_pool();
  machine_wait(handle(T), handle(R));
  machine_launch(graph, handle(T));
  give(&x);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
  release_pool(1);
}

/* 9d: S reads late before anybody observes. */
static void read_before_the_observer(thread *t)
{
  (void)t;
  begin(64);
  block x = take_written(X * MIB, R);
  read_on(&x, S, LATE);
  if (!unmarked)
    must(esper_note_unseen_uses(p.core), "note_unseen_uses");
  give(&x);
  x = take_written(X * MIB, R);
  end_of(&x, 1);
}

static const struct {
  const char *name;
  void (*run)(thread *t);
} EPISODES[] = {
#define EPISODE(name) {#name, name}
    EPISODE(two_threads_mark),
    EPISODE(follower_writes_first),
    EPISODE(stale_owner_order),
    EPISODE(merged_stamp),
    EPISODE(borrower),
    EPISODE(lent_too_early),
    EPISODE(given_back),
    EPISODE(marks_in_a_loop),
    EPISODE(later_use),
    EPISODE(later_read),
    EPISODE(event_used_again),
    EPISODE(refused_queries),
    EPISODE(mark_in_a_capture),
    EPISODE(memory_of_a_capture),
    EPISODE(destroyed_reader),
    EPISODE(replaced_reader),
    EPISODE(replaced_owner),
    EPISODE(rendezvous),
    EPISODE(uses_that_are_over),
    EPISODE(pool_not_waited_for),
    EPISODE(freed_while_captured),
    EPISODE(memory_of_a_graph),
    EPISODE(mark_beside_a_capture),
    EPISODE(captured_use),
    EPISODE(captured_follower),
    EPISODE(captured_late_wait),
    EPISODE(late_wait),
    EPISODE(read_outside),
    EPISODE(rendezvous_of_the_owner),
    EPISODE(checkpoint_of_what_is_read),
    EPISODE(checkpoint_of_what_is_whole),
    EPISODE(unmapped),
    EPISODE(lent_pages),
    EPISODE(moved_pages),
    EPISODE(stale_cache),
    EPISODE(read_in_cache),
    EPISODE(held_back),
    EPISODE(graph_reads_elsewhere),
    EPISODE(read_before_the_observer),
    EPISODE(held_back_in_vain),
#undef EPISODE
};

enum { EPISODE_COUNT = sizeof EPISODES / sizeof *EPISODES };
enum { LAST_IS_RARE = 4 }; /* it waits for a second */
static int only_episode = -1;

static bool choose_episode(const char *name)
{
  for (int i = 0; i < EPISODE_COUNT; i++)
    if (!strcmp(EPISODES[i].name, name))
      only_episode = i;
  return only_episode >= 0;
}

static void run_episode(thread *t)
{
  int which = only_episode;
  while (which < 0 || (which == EPISODE_COUNT - 1 && only_episode < 0 && !chance(t, LAST_IS_RARE)))
    which = draw(t, EPISODE_COUNT);
  p.kind = EPISODES[which].name;
  p.threads = 1;
  EPISODES[which].run(t);
  end();
}

/* ---- the run -------------------------------------------------------------- */

static void run_program(uint64_t seed)
{
  thread maker = {.random = seed};
  p.seed = seed;
  atomic_store(&p.step, 0);
  if (chance(&maker, 4) || only_episode >= 0)
    run_episode(&maker);
  else
    run_random(&maker);
}

static const char *const RULES[] = {
#define NAME(name, number, says) #name,
    ESPER_RULES(NAME)
#undef NAME
};

static bool switch_off(const char *name)
{
#ifdef ESPER_RULE_SWITCHES
  for (int i = 0; i < RULE_COUNT; i++)
    if (!strcmp(RULES[i], name)) {
      esper_rules_off |= 1ul << i;
      return true;
    }
#else
  (void)name;
#endif
  return false;
}

int main(int count, char **arguments)
{
  uint64_t seed = 1, programs = 1000;
  double limit = 1e9;
  for (int i = 1; i < count; i++) {
    const char *name = arguments[i];
    if (!strcmp(name, "--list")) {
      for (int k = 0; k < RULE_COUNT; k++)
        puts(RULES[k]);
      return 0;
    }
    if (!strcmp(name, "--unmarked")) {
      unmarked = true;
      continue;
    }
    const char *value = ++i < count ? arguments[i] : "";
    char *rest = "";
    if (!strcmp(name, "--without") && switch_off(value))
      continue;
    if (!strcmp(name, "--episode") && choose_episode(value))
      continue;
    if (!strcmp(name, "--seed"))
      seed = strtoull(value, &rest, 10);
    else if (!strcmp(name, "--programs"))
      programs = strtoull(value, &rest, 10);
    else if (!strcmp(name, "--seconds"))
      limit = strtod(value, &rest);
    else
      rest = "?";
    if (*rest || !*value) {
      fprintf(stderr, "programs: what is %s %s?\n", name, value);
      return 2;
    }
  }
  machine_open();
  pthread_mutex_init(&p.shelf_lock, NULL);
  uint64_t first = seed, ran = 0;
  double start = seconds();
  for (; ran < programs && seconds() - start < limit; ran++)
    run_program(seed++);
  printf("nothing is wrong in %llu programs, seeds from %llu: %llu blocks handed out, %llu "
         "refused, %llu reads checked, in %.1f s\n",
         (unsigned long long)ran, (unsigned long long)first,
         (unsigned long long)atomic_load(&handed_out), (unsigned long long)atomic_load(&refused),
         (unsigned long long)atomic_load(&checks), seconds() - start);
  return 0;
}
