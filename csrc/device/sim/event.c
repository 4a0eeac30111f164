/* event.c: events, and waiting for them. */
#include "event.h"

#include <stdlib.h>

#include "base.h"
#include "clock.h"
#include "graph.h"
#include "queue.h"
#include "stream.h"

/* Handles are positions in a table, so any handle can be checked safely. */
static const uintptr_t EVENT_BASE = (uintptr_t)0x5 << 40, EVENT_STEP = 16;

void *sim_event_new(sim *s, int device, int of_core)
{
  uint32_t place;
  if (s->free_event_count) {
    place = s->free_events[--s->free_event_count];
  } else {
    s->events = sim_grow32(s->events, s->event_count, &s->event_capacity, sizeof *s->events);
    s->events[s->event_count] = calloc(1, sizeof **s->events);
    if (!s->events[s->event_count])
      abort();
    place = s->event_count++;
  }
  sim_event *event = s->events[place];
  event->device = device;
  event->alive = 1;
  event->index = 0;
  event->all = 0;
  event->capture = 0;
  event->by_program.count = 0;
  event->of_core = of_core;
  if (of_core)
    s->devices[device].alive.events++;
  return (void *)(EVENT_BASE + place * EVENT_STEP);
}

static int event_place(const sim *s, void *handle, uint32_t *place)
{
  uintptr_t h = (uintptr_t)handle;
  if (h < EVENT_BASE || (h - EVENT_BASE) % EVENT_STEP)
    return 0;
  if ((h - EVENT_BASE) / EVENT_STEP >= s->event_count)
    return 0;
  *place = (uint32_t)((h - EVENT_BASE) / EVENT_STEP);
  return 1;
}

sim_event *sim_event_find(sim *s, int device, void *handle, const char *who)
{
  uint32_t place;
  if (event_place(s, handle, &place) && s->events[place]->alive &&
      (device < 0 || s->events[place]->device == device))
    return s->events[place];
  sim_report(s, "%s: %p is no event of device %d (destroyed?)\n", who, handle, device);
  sim_refuse(ESPER_DEVICE_ERROR, "sim: %p is no event of device %d", handle, device);
  return NULL;
}

void sim_event_kill(sim *s, void *handle)
{
  uint32_t place;
  if (!event_place(s, handle, &place))
    return;
  sim_event *event = s->events[place];
  event->alive = 0;
  if (event->of_core)
    s->devices[event->device].alive.events--;
  s->free_events = sim_grow32(s->free_events, s->free_event_count, &s->free_event_capacity,
                              sizeof *s->free_events);
  s->free_events[s->free_event_count++] = place;
}

void sim_record_now(sim *s, sim_stream *stream, sim_event *event)
{
  if (stream->capture) {
    event->capture = stream->capture->id;
    sim_nodes_copy(&event->nodes, &stream->tails);
    return;
  }
  event->capture = 0;
  event->all = 0;
  event->slot = stream->slot;
  event->index = sim_enqueue(s, stream, &(sim_op){.kind = SIM_OP_RECORD});
  if (s->options.oracle)
    sim_clock_copy(s, &event->clock, &stream->clock);
  if (s->options.oracle && !event->of_core) {
    sim_clock_copy(s, &event->by_program, &stream->by_program);
    sim_clock_set(s, &event->by_program, stream->slot, event->index);
  }
}

/* Makes the event stand for what is on every stream of the device. */
esper_status sim_record_all_now(sim *s, int device, sim_event *event)
{
  if (sim_captures_break(s, device))
    return sim_refuse(ESPER_CAPTURING,
                      "sim: a stream of device %d was being captured, which "
                      "is invalid now",
                      device);
  event->capture = 0;
  event->all = 1;
  event->until.count = event->clock.count = 0;
  for (uint32_t i = 0; i < s->stream_count; i++) {
    const sim_stream *stream = s->streams[i];
    if (stream->device != device)
      continue;
    sim_clock_set(s, &event->until, i, stream->enqueued);
    if (s->options.oracle)
      sim_clock_join(s, &event->clock, &stream->clock);
  }
  return ESPER_OK;
}

static int event_is_fresh(const sim_event *event)
{
  return !event->all && event->index == 0;
}

static int event_is_done(const sim *s, const sim_event *event)
{
  if (!event->all)
    return sim_op_is_done(s, event->slot, event->index);
  for (uint32_t i = 0; i < event->until.count; i++)
    if (!sim_op_is_done(s, i, event->until.at[i]))
      return 0;
  return 1;
}

static int run_to_event(sim *s, const sim_event *event)
{
  if (!event->all)
    return sim_run_to(s, s->streams[event->slot], event->index);
  for (uint32_t i = 0; i < event->until.count; i++)
    if (!sim_run_to(s, s->streams[i], event->until.at[i]))
      return 0;
  return 1;
}

static int try_to_reach_event(sim *s, const sim_event *event)
{
  if (!event->all)
    return sim_try_to_reach(s, s->streams[event->slot], event->index);
  for (uint32_t i = 0; i < event->until.count; i++)
    if (!sim_try_to_reach(s, s->streams[i], event->until.at[i]))
      return 0;
  return 1;
}

static esper_status refuse_captured(void)
{
  return sim_refuse(ESPER_CAPTURING, "sim: the event was recorded inside a capture");
}

static void host_learns(sim *s, const sim_event *event)
{
  if (s->options.oracle && (event->all || sim_clock_get(&s->host, event->slot) < event->index))
    sim_host_learn(s, &event->clock);
}

esper_status sim_query_now(sim *s, sim_event *event)
{
  if (event->capture)
    return refuse_captured();
  if (event_is_fresh(event))
    return ESPER_OK;
  if (!event_is_done(s, event))
    return ESPER_NOT_READY;
  host_learns(s, event);
  return ESPER_OK;
}

esper_status sim_wait_host(sim *s, sim_event *event)
{
  if (event->capture)
    return refuse_captured();
  if (event_is_fresh(event))
    return ESPER_OK;
  if (!run_to_event(s, event))
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: the event never completes");
  host_learns(s, event);
  return ESPER_OK;
}

/* However much time passes, an event that never completes has not completed. With seeds a random
 * amount of time passes, so that the caller sees both answers. */
esper_status sim_wait_host_while(sim *s, sim_event *event)
{
  if (event->capture)
    return refuse_captured();
  enum { MOST = 64 };
  if (s->options.completion == SIM_SEEDED)
    for (int i = 0; i < MOST && !event_is_done(s, event); i++)
      sim_let_time_pass(s);
  else if (!event_is_fresh(event) && !try_to_reach_event(s, event))
    return ESPER_NOT_READY;
  return sim_query_now(s, event);
}

esper_status sim_wait_device(sim *s, int device)
{
  if (sim_captures_break(s, device))
    return sim_refuse(ESPER_CAPTURING,
                      "sim: a stream of device %d was being captured, which "
                      "is invalid now",
                      device);
  for (uint32_t i = 0; i < s->stream_count; i++) {
    sim_stream *stream = s->streams[i];
    if (stream->device != device)
      continue;
    if (!sim_run_to(s, stream, stream->enqueued))
      return sim_refuse(ESPER_DEVICE_ERROR, "sim: the device hangs");
    if (s->options.oracle && sim_clock_get(&s->host, i) < stream->enqueued)
      sim_host_learn(s, &stream->clock);
  }
  return ESPER_OK;
}

static void wait_for_op(sim *s, sim_stream *stream, uint32_t slot, uint64_t index)
{
  sim_enqueue(s, stream, &(sim_op){.kind = SIM_OP_WAIT, .slot = slot, .index = index});
}

esper_status sim_wait_stream(sim *s, sim_stream *stream, sim_event *event, int of_core)
{
  if (!stream->capture && !event->capture) {
    if (event_is_fresh(event))
      return ESPER_OK; /* nothing to wait for */
    if (s->options.oracle && of_core)
      sim_stream_core_waits(s, stream);
    else if (s->options.oracle)
      sim_clock_join(s, &stream->by_program, &event->by_program);
    if (s->options.oracle)
      sim_clock_join(s, &stream->clock, &event->clock);
    if (!event->all)
      wait_for_op(s, stream, event->slot, event->index);
    for (uint32_t i = 0; event->all && i < event->until.count; i++)
      if (event->until.at[i])
        wait_for_op(s, stream, i, event->until.at[i]);
    if (!of_core)
      sim_stream_given(stream);
    return ESPER_OK;
  }
  sim_graph *from = event->capture ? sim_capture_find(s, event->capture) : NULL;
  if (stream->capture ? stream->capture == from : from && !of_core) {
    /* Both are in one capture, or a stream of the program's joins it here. The core must not wait
     * like that: it would draw a stream into the capture. */
    if (!stream->capture) {
      stream->capture = from;
      stream->tails.count = 0;
    }
    sim_nodes_add(&stream->tails, &event->nodes);
    return ESPER_OK;
  }
  /* One is inside a capture and the other is not, or they are in two: they cannot be ordered. */
  if (stream->capture)
    sim_capture_invalidate(s, stream->capture->id);
  if (event->capture)
    sim_capture_invalidate(s, event->capture);
  return sim_refuse(ESPER_CAPTURING, "sim: a wait across the border of a capture, which is "
                                     "invalid now");
}

/* ---- the program ------------------------------------------------------- */

void *sim_event_create(sim *s, int device)
{
  sim_enter(s);
  void *handle = sim_event_new(s, device, 0);
  sim_leave(s);
  return handle;
}

void sim_event_destroy(sim *s, int device, void *handle)
{
  sim_enter(s);
  if (sim_event_find(s, device, handle, "sim_event_destroy"))
    sim_event_kill(s, handle);
  sim_leave(s);
}

esper_status sim_event_record(sim *s, int device, void *event, void *stream)
{
  sim_enter(s);
  sim_event *e = sim_event_find(s, device, event, "sim_event_record");
  sim_stream *st = sim_stream_find(s, device, stream, "sim_event_record");
  if (e && st)
    sim_record_now(s, st, e);
  sim_leave(s);
  return e && st ? ESPER_OK : ESPER_DEVICE_ERROR;
}

static esper_status with_event(sim *s, int device, void *event, const char *who,
                               esper_status (*act)(sim *, sim_event *))
{
  sim_enter(s);
  sim_event *e = sim_event_find(s, device, event, who);
  esper_status status = e ? act(s, e) : ESPER_DEVICE_ERROR;
  sim_leave(s);
  return status;
}

esper_status sim_event_query(sim *s, int device, void *event)
{
  return with_event(s, device, event, "sim_event_query", sim_query_now);
}

esper_status sim_event_synchronize(sim *s, int device, void *event)
{
  return with_event(s, device, event, "sim_event_synchronize", sim_wait_host);
}

esper_status sim_stream_wait(sim *s, int device, void *stream, void *event)
{
  sim_enter(s);
  sim_stream *st = sim_stream_find(s, device, stream, "sim_stream_wait");
  sim_event *e = sim_event_find(s, -1, event, "sim_stream_wait");
  esper_status status = st && e ? sim_wait_stream(s, st, e, 0) : ESPER_DEVICE_ERROR;
  sim_leave(s);
  return status;
}

esper_status sim_stream_synchronize(sim *s, int device, void *stream)
{
  void *event = sim_event_create(s, device);
  esper_status status = sim_event_record(s, device, event, stream);
  if (status == ESPER_OK)
    status = sim_event_synchronize(s, device, event);
  sim_event_destroy(s, device, event);
  return status;
}

esper_status sim_device_synchronize(sim *s, int device)
{
  sim_enter(s);
  esper_status status = sim_wait_device(s, device);
  sim_leave(s);
  return status;
}

void sim_stream_wait_stream(sim *s, int device, void *stream, int other_device, void *other)
{
  void *event = sim_event_create(s, other_device);
  sim_event_record(s, other_device, event, other);
  sim_stream_wait(s, device, stream, event);
  sim_event_destroy(s, other_device, event);
}

/* ---- lifetime ---------------------------------------------------------- */

void sim_events_destroy(sim *s)
{
  for (uint32_t i = 0; i < s->event_count; i++) {
    free(s->events[i]->clock.at);
    free(s->events[i]->until.at);
    free(s->events[i]->nodes.at);
    free(s->events[i]->by_program.at);
    free(s->events[i]);
  }
  free(s->events);
  free(s->free_events);
}
