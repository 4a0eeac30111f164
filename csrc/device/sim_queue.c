/* sim_queue.c: streams as queues of operations, the passing of time, events.
 *
 * Every wait of a stream is for an operation enqueued before, so waits alone
 * form no cycle; flags can. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* Handles are places in tables, so that any handle can be looked at safely. */
static const uintptr_t STREAM_BASE = 0x10000, STREAM_STEP = 64;
static const uintptr_t EVENT_BASE = (uintptr_t)0x5 << 40, EVENT_STEP = 16;

/* ---- streams ---------------------------------------------------------- */

void *sim_stream_handle(const sim_stream *stream)
{
  if (stream->handle == SIM_NONE)
    return NULL;
  return (void *)(STREAM_BASE + stream->handle * STREAM_STEP);
}

/* Whether a destroyed stream's slot can carry another stream: nobody has to
 * ask any more whether its operations are done. */
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
  return stream;
}

void *sim_stream_new(sim *s, int device)
{
  sim_stream *stream = stream_make(s, device);
  if (s->free_handle_count) {
    stream->handle = s->free_handles[--s->free_handle_count];
  } else {
    s->handles = sim_grow32(s->handles, s->handle_count, &s->handle_capacity, sizeof *s->handles);
    stream->handle = s->handle_count++;
  }
  s->handles[stream->handle] = stream->slot;
  return sim_stream_handle(stream);
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

/* ---- operations and time ---------------------------------------------- */

static int is_done(const sim *s, uint32_t slot, uint64_t index)
{
  return s->streams[slot]->executed >= index;
}

static int can_execute(const sim *s, const sim_op *op)
{
  if (op->kind == SIM_OP_WAIT)
    return is_done(s, op->slot, op->index);
  if (op->kind == SIM_OP_WAIT_FLAG)
    return (int)(s->flags >> op->index & 1);
  return 1;
}

static void execute_nodes(sim *s, const sim_graph *graph)
{
  for (uint32_t i = 0; i < graph->count; i++) {
    const sim_op *op = &graph->nodes[i].op;
    if (op->kind == SIM_OP_GRAPH)
      execute_nodes(s, op->graph);
    else if (op->kind == SIM_OP_KERNEL && op->size)
      sim_pattern_access(s, op);
  }
}

static void execute(sim *s, const sim_op *op)
{
  switch (op->kind) {
  case SIM_OP_KERNEL:
    if (op->size)
      sim_pattern_access(s, op);
    break;
  case SIM_OP_RAISE_FLAG: s->flags |= (uint64_t)1 << op->index; break;
  case SIM_OP_GRAPH:
    execute_nodes(s, op->graph);
    sim_graph_drop(s, op->graph);
    break;
  case SIM_OP_RECORD:
  case SIM_OP_WAIT:
  case SIM_OP_WAIT_FLAG: break;
  }
}

static void pending_add(sim *s, sim_stream *stream)
{
  s->pending = sim_grow32(s->pending, s->pending_count, &s->pending_capacity, sizeof *s->pending);
  stream->pending_at = s->pending_count;
  s->pending[s->pending_count++] = stream->slot;
}

static void pending_remove(sim *s, sim_stream *stream)
{
  uint32_t last = s->pending[--s->pending_count];
  s->pending[stream->pending_at] = last;
  s->streams[last]->pending_at = stream->pending_at;
  stream->pending_at = SIM_NONE;
}

static sim_op *op_at(const sim_stream *stream, uint64_t index)
{
  return &stream->ops[index & (stream->ops_capacity - 1)];
}

static void ops_make_room(sim_stream *stream)
{
  uint64_t held = stream->enqueued - stream->executed;
  if (held < stream->ops_capacity)
    return;
  uint64_t capacity = stream->ops_capacity ? stream->ops_capacity * 2 : 16;
  sim_op *ops = malloc(capacity * sizeof *ops);
  if (!ops)
    abort();
  for (uint64_t i = stream->executed + 1; i <= stream->enqueued; i++)
    ops[i & (capacity - 1)] = *op_at(stream, i);
  free(stream->ops);
  stream->ops = ops;
  stream->ops_capacity = capacity;
}

/* The stream's next operation, when it can. */
static int step(sim *s, sim_stream *stream)
{
  if (stream->executed == stream->enqueued)
    return 0;
  const sim_op *op = op_at(stream, stream->executed + 1);
  if (!can_execute(s, op))
    return 0;
  execute(s, op);
  if (++stream->executed == stream->enqueued)
    pending_remove(s, stream);
  return 1;
}

static size_t run_everything(sim *s)
{
  size_t total = 0, steps;
  do {
    steps = 0;
    /* From the end: step() puts the last one in the place of one it removes. */
    for (uint32_t i = s->pending_count; i-- > 0;) {
      sim_stream *stream = s->streams[s->pending[i]];
      while (step(s, stream))
        steps++;
    }
    total += steps;
  } while (steps);
  return total;
}

uint64_t sim_enqueue(sim *s, sim_stream *stream, const sim_op *op)
{
  uint64_t index = stream->enqueued + 1;
  if (s->options.oracle) {
    if (stream->host_version != s->host_version) {
      /* The host enqueues this after all that it knows to be over. */
      sim_clock_join(s, &stream->clock, &s->host);
      stream->host_version = s->host_version;
    }
    sim_clock_set(s, &stream->clock, stream->slot, index);
  }
  int at_once = s->options.completion == SIM_AT_ONCE;
  if (at_once && stream->executed + 1 == index && can_execute(s, op)) {
    execute(s, op);
    stream->enqueued = stream->executed = index;
  } else {
    ops_make_room(stream);
    stream->enqueued = index;
    *op_at(stream, index) = *op;
    if (stream->pending_at == SIM_NONE)
      pending_add(s, stream);
  }
  if (at_once && s->pending_count)
    run_everything(s);
  return index;
}

/* Executes what must be for (stream, index) to be done, and nothing else. */
static int run_to(sim *s, sim_stream *stream, uint64_t index)
{
  if (stream->visiting)
    return 0;
  stream->visiting = 1;
  while (stream->executed < index) {
    const sim_op *op = op_at(stream, stream->executed + 1);
    if (op->kind == SIM_OP_WAIT && !can_execute(s, op) &&
        !run_to(s, s->streams[op->slot], op->index))
      break;
    if (!step(s, stream))
      break;
  }
  stream->visiting = 0;
  return stream->executed >= index;
}

static const char *describe(const sim *s, const sim_op *op, char *text, size_t size)
{
  if (op->kind == SIM_OP_WAIT)
    snprintf(text, size, "waits for operation %llu of stream %llu", (unsigned long long)op->index,
             (unsigned long long)s->streams[op->slot]->id);
  else if (op->kind == SIM_OP_WAIT_FLAG)
    snprintf(text, size, "waits for flag %llu", (unsigned long long)op->index);
  else
    snprintf(text, size, "could run");
  return text;
}

int sim_run_to(sim *s, sim_stream *stream, uint64_t index)
{
  if (run_to(s, stream, index))
    return 1;
  while (run_everything(s)) /* other work may raise the flag it waits for */
    if (run_to(s, stream, index))
      return 1;
  sim_report(s,
             "the host waits for operation %llu of stream %llu, which can "
             "never run:\n",
             (unsigned long long)index, (unsigned long long)stream->id);
  for (uint32_t i = 0; i < s->pending_count; i++) {
    const sim_stream *p = s->streams[s->pending[i]];
    char text[96];
    sim_report(s, "  stream %llu (device %d): operation %llu %s\n", (unsigned long long)p->id,
               p->device, (unsigned long long)p->executed + 1,
               describe(s, op_at(p, p->executed + 1), text, sizeof text));
  }
  return 0;
}

void sim_let_time_pass(sim *s)
{
  if (s->pending_count == 0)
    return;
  if (s->pace_left-- == 0) {
    /* Quiet and busy stretches find other things than an even pace does. */
    static const uint32_t PACES[] = {0, 1, 2, 4, 16, 64};
    s->pace = PACES[sim_random(&s->random) % 6];
    s->pace_left = (uint32_t)(sim_random(&s->random) % 64);
  }
  uint32_t steps = s->pace ? (uint32_t)(sim_random(&s->random) % s->pace) : 0;
  while (steps-- && s->pending_count)
    step(s, s->streams[s->pending[sim_random(&s->random) % s->pending_count]]);
}

/* ---- events ------------------------------------------------------------ */

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
}

/* The event stands for what is on every stream of the device. */
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
    return is_done(s, event->slot, event->index);
  for (uint32_t i = 0; i < event->until.count; i++)
    if (!is_done(s, i, event->until.at[i]))
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
    if (s->options.oracle)
      sim_clock_join(s, &stream->clock, &event->clock);
    if (!event->all)
      wait_for_op(s, stream, event->slot, event->index);
    for (uint32_t i = 0; event->all && i < event->until.count; i++)
      if (event->until.at[i])
        wait_for_op(s, stream, i, event->until.at[i]);
    return ESPER_OK;
  }
  sim_graph *from = event->capture ? sim_capture_find(s, event->capture) : NULL;
  if (stream->capture ? stream->capture == from : from && !of_core) {
    /* Inside one capture; a program's stream that was outside joins it. The
     * core has no business there: it would drag a stream in. */
    if (!stream->capture) {
      stream->capture = from;
      stream->tails.count = 0;
    }
    sim_nodes_add(&stream->tails, &event->nodes);
    return ESPER_OK;
  }
  /* Inside and outside, or two captures: nothing orders the two. */
  if (stream->capture)
    sim_capture_invalidate(s, stream->capture->id);
  if (event->capture)
    sim_capture_invalidate(s, event->capture);
  return sim_refuse(ESPER_CAPTURING, "sim: a wait across the border of a capture, which is "
                                     "invalid now");
}

/* ---- the program ------------------------------------------------------- */

void *sim_stream_create(sim *s, int device)
{
  sim_enter(s);
  void *handle = sim_stream_new(s, device);
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

void sim_kernel(sim *s, int device, void *handle, const void *address, size_t size,
                sim_access access)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_kernel");
  sim_op op = {.kind = SIM_OP_KERNEL, .access = access};
  uint64_t owner = 1;
  if (stream && stream->capture && !sim_capture_of(stream))
    stream = NULL;
  if (stream && size && s->options.oracle) {
    owner = sim_oracle_owner(s, "sim_kernel", (uintptr_t)address, size);
    uintptr_t closed = owner ? sim_closed_to(s, device, (uintptr_t)address, size) : 0;
    if (closed) {
      sim_report(s,
                 "a kernel of device %d accesses a page at 0x%zx, to which "
                 "that device was given no access\n",
                 device, (size_t)closed);
      owner = 0;
    }
    if (s->options.backed || stream->capture) {
      op.address = (uintptr_t)address;
      op.size = size;
      op.owner = owner;
    }
  }
  if (stream && owner) {
    uint64_t index = 0;
    uint32_t node = SIM_NONE;
    if (stream->capture)
      node = sim_capture_add(s, stream, &op);
    else
      index = sim_enqueue(s, stream, &op);
    if (size && s->options.oracle)
      sim_oracle_access(s, stream, index, node, (uintptr_t)address, size, 0);
  }
  sim_leave(s);
}

static void flag_op(sim *s, int device, void *handle, unsigned flag, sim_op_kind kind,
                    const char *who)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, who);
  if (stream && (flag >= SIM_FLAGS || stream->capture))
    sim_report(s, "%s: flags are 0 to 63, and not for captures\n", who);
  else if (stream)
    sim_enqueue(s, stream, &(sim_op){.kind = kind, .index = flag});
  sim_leave(s);
}

void sim_wait_flag(sim *s, int device, void *stream, unsigned flag)
{
  flag_op(s, device, stream, flag, SIM_OP_WAIT_FLAG, "sim_wait_flag");
}

void sim_raise_flag(sim *s, int device, void *stream, unsigned flag)
{
  flag_op(s, device, stream, flag, SIM_OP_RAISE_FLAG, "sim_raise_flag");
}

void sim_raise_flag_now(sim *s, unsigned flag)
{
  sim_enter(s);
  s->flags |= (uint64_t)1 << (flag % SIM_FLAGS);
  if (s->options.completion == SIM_AT_ONCE)
    run_everything(s);
  sim_leave(s);
}

void sim_lower_flag_now(sim *s, unsigned flag)
{
  sim_enter(s);
  s->flags &= ~((uint64_t)1 << (flag % SIM_FLAGS));
  sim_leave(s);
}

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

size_t sim_run_stream(sim *s, int device, void *handle, size_t count)
{
  size_t steps = 0;
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_run_stream");
  while (stream && steps < count && step(s, stream))
    steps++;
  sim_leave(s);
  return steps;
}

size_t sim_run_all(sim *s)
{
  sim_enter(s);
  size_t steps = run_everything(s);
  sim_leave(s);
  return steps;
}

size_t sim_run_seeded(sim *s, uint64_t seed, size_t steps)
{
  size_t done = 0;
  sim_enter(s);
  for (size_t i = 0; i < steps && s->pending_count; i++) {
    uint64_t r = sim_random(&seed);
    done += (size_t)step(s, s->streams[s->pending[r % s->pending_count]]);
  }
  sim_leave(s);
  return done;
}

size_t sim_pending(sim *s, int device, void *handle)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_pending");
  size_t count = stream ? stream->enqueued - stream->executed : 0;
  sim_leave(s);
  return count;
}

size_t sim_pending_all(sim *s)
{
  size_t count = 0;
  sim_enter(s);
  for (uint32_t i = 0; i < s->pending_count; i++) {
    const sim_stream *stream = s->streams[s->pending[i]];
    count += stream->enqueued - stream->executed;
  }
  sim_leave(s);
  return count;
}

/* ---- lifetime ---------------------------------------------------------- */

int sim_queue_init(sim *s)
{
  s->next_stream_id = 100; /* ids are not handles; make mixing them up show */
  s->next_capture_id = 1;
  for (int d = 0; d < s->options.devices; d++)
    s->devices[d].legacy = stream_make(s, d)->slot;
  return 1;
}

void sim_queue_destroy(sim *s)
{
  for (uint32_t i = 0; i < s->stream_count; i++) {
    sim_stream *stream = s->streams[i];
    for (uint64_t k = stream->executed + 1; k <= stream->enqueued; k++)
      if (op_at(stream, k)->kind == SIM_OP_GRAPH)
        sim_graph_drop(s, op_at(stream, k)->graph);
    free(stream->ops);
    free(stream->clock.at);
    free(stream->tails.at);
    free(stream);
  }
  for (uint32_t i = 0; i < s->event_count; i++) {
    free(s->events[i]->clock.at);
    free(s->events[i]->until.at);
    free(s->events[i]->nodes.at);
    free(s->events[i]);
  }
  free(s->streams);
  free(s->handles);
  free(s->free_handles);
  free(s->thread_streams);
  free(s->pending);
  free(s->events);
  free(s->free_events);
}
