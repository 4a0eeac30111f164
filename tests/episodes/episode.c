#include "episode.h"

#include <stdarg.h>

enum { STAND_INS = 8 };
static void *stand_ins[STAND_INS];
static int stand_in_count;

_Noreturn void found(const char *format, ...)
{
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  check_failed("episode", (int)atomic_load(&p.step), "%s", text);
}

/* ---- beginning and end ---------------------------------------------------- */

static void begin_as(esper_segments segments, size_t allowance, size_t bytes)
{
  static bool is_open;
  if (!is_open)
    machine_open();
  is_open = true;
  p.seed = 1; /* the simulated device completes what somebody waits for */
  atomic_store(&p.step, 0);
  program_begin(segments, allowance, bytes);
}

void begin(size_t bytes)
{
  begin_as(ESPER_SEGMENTS_CLASSIC, ESPER_ALLOWANCE_OFF, bytes);
}

void begin_mapped(size_t bytes)
{
  begin_as(ESPER_SEGMENTS_MAPPED, ESPER_ALLOWANCE_OFF, bytes);
}

void begin_held_back(void)
{
  begin_as(ESPER_SEGMENTS_CLASSIC, 1, 0);
}

static void give_the_rest(void)
{
  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(p.core, -1, &snapshot));
  for (size_t i = 0; i < snapshot.block_count; i++)
    if (snapshot.blocks[i].state == ESPER_BLOCK_ALLOCATED)
      give(&(block){.at = (char *)snapshot.blocks[i].address});
  esper_snapshot_free(&snapshot);
}

void end_with(block *const blocks[])
{
  for (; *blocks; blocks++) {
    CHECK((*blocks)->at);
    program_check(*blocks, 1);
  }
  program_check(NULL, 0);
  give_the_rest();
  while (stand_in_count)
    machine_stream_destroy(stand_ins[--stand_in_count]);
  machine_finish();
  program_end();
}

/* ---- work and marks ------------------------------------------------------- */

void write_late(block *b)
{
  machine_delay(handle(b->owner), LATE);
  write_block(b);
}

void read_and_mark(const block *b, int reader, unsigned delay)
{
  read_on(b, reader, delay);
  mark(b, reader, 0);
}

void record_something(int stream, int other)
{
  block b = take_written(512, other);
  read_and_mark(&b, stream, 0);
  give(&b);
}

void drain_both(int one, int other)
{
  machine_sync(handle(one));
  machine_sync(handle(other));
  esper_retire(p.core, 0);
}

void mark_by(marked how, const block *b, int reader)
{
  switch (how) {
  case BY_MARK: mark(b, reader, 0); break;
  case BY_MARK_UNTIL_FREE: mark(b, reader, ESPER_USE_UNTIL_FREE); break;
  case BY_RECORD_STREAM: mark_until_free(b, reader); break;
  case BY_NOTE: note(b, reader); break;
  default: mark_event(b, reader, O);
  }
}

block first_on_T(size_t size)
{
  machine_wait(handle(T), handle(R));
  block b = take_for(size, R, T);
  write_block(&b);
  mark(&b, T, 0);
  return b;
}

/* ---- captures and pools --------------------------------------------------- */

void capture_begin(int stream)
{
  machine_capture_begin(handle(stream));
}

void *capture_end(int stream)
{
  void *graph = machine_capture_end(handle(stream));
  if (!graph)
    found("a capture was invalidated");
  return graph;
}

void capture_launch(int stream)
{
  machine_launch(capture_end(R), handle(stream));
}

static int any_stream(void *context, void *stream)
{
  (void)context, (void)stream;
  return 1;
}

void pool_open(void)
{
  CHECK_OK(esper_pool_begin(p.core, 0, POOL, 0, any_stream, NULL));
}

void pool_close(void)
{
  CHECK_OK(esper_pool_end(p.core, 0, POOL, 0, NULL));
}

void pool_release(int references)
{
  while (references--)
    CHECK_OK(esper_pool_release(p.core, 0, POOL, 0));
}

/* ---- figures -------------------------------------------------------------- */

esper_counters counters_now(void)
{
  esper_counters counters;
  CHECK_OK(esper_get_counters(p.core, 0, &counters));
  return counters;
}

size_t reserved_now(void)
{
  esper_stats stats;
  CHECK_OK(esper_get_stats(p.core, 0, &stats));
  return (size_t)stats.reserved_bytes[ESPER_ALL].current;
}

/* ---- streams that come and go --------------------------------------------- */

int mortal_stream(void)
{
  p.streams[p.stream_count] = (esper_stream){machine_stream_create(), 0, 0};
  return p.stream_count++;
}

void destroy_stream(int stream)
{
  machine_stream_destroy(handle(stream));
}

void replace_stream(int stream)
{
  while (stand_in_count < STAND_INS) {
    stand_ins[stand_in_count++] = machine_stream_create();
    if (stand_ins[stand_in_count - 1] == handle(stream))
      break;
  }
  p.streams[stream].handle = stand_ins[stand_in_count - 1];
}
