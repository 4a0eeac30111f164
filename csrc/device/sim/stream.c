/* stream.c: streams and their handles. A destroyed stream's handle, and later its slot, is used for
 * another one. */
#include "stream.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base.h"
#include "clock.h"

/* Handles are positions in a table, so any handle can be checked safely. */
static const uintptr_t STREAM_BASE = 0x10000, STREAM_STEP = 64;

void *sim_stream_handle(const sim_stream *stream)
{
  if (stream->handle == SIM_NONE)
    return NULL;
  return (void *)(STREAM_BASE + stream->handle * STREAM_STEP);
}

/* Whether a destroyed stream's slot can be reused, because nobody needs to ask any more whether its
 * operations are done. */
static int slot_is_reusable(const sim *s, const sim_stream *stream)
{
  return !stream->alive && stream->executed == stream->enqueued &&
         (!s->options.oracle || sim_clock_get(&s->host, stream->slot) >= stream->enqueued);
}

static sim_stream *slot_take(sim *s)
{
  if (s->dead_count)
    for (uint32_t i = 0; i < s->stream_count; i++)
      if (slot_is_reusable(s, s->streams[i])) {
        s->dead_count--;
        return s->streams[i];
      }
  sim_stream *stream = calloc(1, sizeof *stream);
  if (!stream)
    abort();
  s->streams = sim_grow32(s->streams, s->stream_count, &s->stream_capacity, sizeof *s->streams);
  stream->slot = s->stream_count;
  stream->pending_at = SIM_NONE;
  s->streams[s->stream_count++] = stream;
  return stream;
}

static sim_stream *stream_make(sim *s, int device)
{
  sim_stream *stream = slot_take(s);
  stream->device = device;
  stream->id = s->next_stream_id++;
  stream->handle = SIM_NONE;
  stream->alive = 1;
  stream->clock.count = 0;
  stream->host_version = 0;
  stream->capture = NULL;
  stream->tails.count = 0;
  stream->of_core = 0;
  stream->given = stream->enqueued;
  stream->core_waited = 0;
  stream->by_program.count = 0;
  return stream;
}

void *sim_stream_new(sim *s, int device, int of_core)
{
  sim_stream *stream = stream_make(s, device);
  stream->of_core = of_core;
  if (s->free_handle_count) {
    stream->handle = s->free_handles[--s->free_handle_count];
  } else {
    s->handles = sim_grow32(s->handles, s->handle_count, &s->handle_capacity, sizeof *s->handles);
    stream->handle = s->handle_count++;
  }
  s->handles[stream->handle] = stream->slot;
  return sim_stream_handle(stream);
}

void sim_stream_given(sim_stream *stream)
{
  if (stream->of_core || stream->capture)
    return;
  stream->given = stream->enqueued;
  stream->core_waited = 0;
}

void sim_stream_core_waits(sim *s, sim_stream *stream)
{
  if (stream->of_core || stream->core_waited)
    return;
  stream->core_waited = 1;
  sim_clock_copy(s, &stream->before_wait, &stream->clock);
}

void sim_stream_kill(sim *s, sim_stream *stream)
{
  if (stream->capture)
    sim_report(s, "stream %llu was destroyed while it is being captured\n",
               (unsigned long long)stream->id);
  if (stream->handle != SIM_NONE) {
    s->handles[stream->handle] = SIM_NONE;
    s->free_handles = sim_grow32(s->free_handles, s->free_handle_count, &s->free_handle_capacity,
                                 sizeof *s->free_handles);
    s->free_handles[s->free_handle_count++] = stream->handle;
  }
  stream->handle = SIM_NONE;
  stream->alive = 0;
  s->dead_count++;
}

/* A number for the calling thread, never used again. */
static uint64_t thread_number(void)
{
  static _Atomic uint64_t last;
  static _Thread_local uint64_t mine;
  if (!mine)
    mine = atomic_fetch_add(&last, 1) + 1;
  return mine;
}

static sim_thread_stream *thread_stream(sim *s, int device)
{
  uint64_t thread = thread_number();
  for (size_t i = 0; i < s->thread_stream_count; i++)
    if (s->thread_streams[i].thread == thread && s->thread_streams[i].device == device)
      return &s->thread_streams[i];
  s->thread_streams = sim_grow(s->thread_streams, s->thread_stream_count,
                               &s->thread_stream_capacity, sizeof *s->thread_streams);
  sim_thread_stream *t = &s->thread_streams[s->thread_stream_count++];
  *t = (sim_thread_stream){thread, device, stream_make(s, device)->slot};
  return t;
}

sim_stream *sim_stream_find(sim *s, int device, void *handle, const char *who)
{
  uintptr_t h = (uintptr_t)handle;
  if (device >= 0 && device < s->options.devices) {
    if (h <= 1)
      return s->streams[s->devices[device].legacy];
    if (h == 2) {
      uint32_t slot = thread_stream(s, device)->slot; /* may move streams */
      return s->streams[slot];
    }
    uintptr_t place = (h - STREAM_BASE) / STREAM_STEP;
    if (h >= STREAM_BASE && (h - STREAM_BASE) % STREAM_STEP == 0 && place < s->handle_count &&
        s->handles[place] != SIM_NONE) {
      sim_stream *stream = s->streams[s->handles[place]];
      if (stream->device == device)
        return stream;
    }
  }
  if (who)
    sim_report(s, "%s: %p is no stream of device %d (destroyed?)\n", who, handle, device);
  sim_refuse(ESPER_DEVICE_ERROR, "sim: %p is no stream of device %d", handle, device);
  return NULL;
}

/* ---- the program ------------------------------------------------------- */

void *sim_stream_create(sim *s, int device)
{
  sim_enter(s);
  void *handle = sim_stream_new(s, device, 0);
  sim_leave(s);
  return handle;
}

void sim_stream_destroy(sim *s, int device, void *handle)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_stream_destroy");
  if (stream)
    sim_stream_kill(s, stream);
  sim_leave(s);
}

void sim_thread_stream_destroy(sim *s, int device)
{
  sim_enter(s);
  sim_thread_stream *t = thread_stream(s, device);
  sim_stream_kill(s, s->streams[t->slot]);
  *t = s->thread_streams[--s->thread_stream_count];
  sim_leave(s);
}

uint64_t sim_stream_id(sim *s, int device, void *handle)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_stream_id");
  uint64_t id = stream ? stream->id : 0;
  sim_leave(s);
  return id;
}

/* ---- lifetime ---------------------------------------------------------- */

void sim_streams_init(sim *s)
{
  s->next_stream_id = 100; /* ids are not handles: this makes confusing them visible */
  for (int d = 0; d < s->options.devices; d++)
    s->devices[d].legacy = stream_make(s, d)->slot;
}

void sim_streams_destroy(sim *s)
{
  for (uint32_t i = 0; i < s->stream_count; i++) {
    sim_stream *stream = s->streams[i];
    free(stream->clock.at);
    free(stream->tails.at);
    free(stream->before_wait.at);
    free(stream->by_program.at);
    free(stream);
  }
  free(s->streams);
  free(s->handles);
  free(s->free_handles);
  free(s->thread_streams);
}
