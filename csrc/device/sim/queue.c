/* queue.c: streams as queues of operations, and the passing of time. A stream waits only for
 * operations enqueued earlier, so waits alone form no cycle; flags can. */
#include "queue.h"

#include <stdio.h>
#include <stdlib.h>

#include "base.h"
#include "clock.h"
#include "contents.h"
#include "graph.h"
#include "oracle.h"
#include "stream.h"

int sim_op_is_done(const sim *s, uint32_t slot, uint64_t index)
{
  return s->streams[slot]->executed >= index;
}

static int can_execute(const sim *s, const sim_op *op)
{
  if (op->kind == SIM_OP_WAIT)
    return sim_op_is_done(s, op->slot, op->index);
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
  case SIM_OP_TO_HOST:
  case SIM_OP_TO_DEVICE:
  case SIM_OP_ZERO: sim_copy_execute(s, op); break;
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

/* Executes the stream's next operation if it can run. */
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
    /* From the end, because step() moves the last one to the position of one it removes. */
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
      /* The operation comes after everything that the host knows to be over. */
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

/* Executes what (stream, index) depends on, and nothing else. */
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

int sim_try_to_reach(sim *s, sim_stream *stream, uint64_t index)
{
  if (run_to(s, stream, index))
    return 1;
  while (run_everything(s)) /* other work may raise the flag that it waits for */
    if (run_to(s, stream, index))
      return 1;
  return 0;
}

int sim_run_to(sim *s, sim_stream *stream, uint64_t index)
{
  if (sim_try_to_reach(s, stream, index))
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
    /* Quiet and busy phases find other bugs than an even pace does. */
    static const uint32_t PACES[] = {0, 1, 2, 4, 16, 64};
    s->pace = PACES[sim_random(&s->random) % 6];
    s->pace_left = (uint32_t)(sim_random(&s->random) % 64);
  }
  uint32_t steps = s->pace ? (uint32_t)(sim_random(&s->random) % s->pace) : 0;
  while (steps-- && s->pending_count)
    step(s, s->streams[s->pending[sim_random(&s->random) % s->pending_count]]);
}

/* ---- the program ------------------------------------------------------- */

static void flag_op(sim *s, int device, void *handle, unsigned flag, sim_op_kind kind,
                    const char *who)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, who);
  if (stream && (flag >= SIM_FLAGS || stream->capture))
    sim_report(s, "%s: flags are 0 to 63, and not for captures\n", who);
  else if (stream)
    sim_enqueue(s, stream, &(sim_op){.kind = kind, .index = flag});
  if (stream)
    sim_stream_given(stream);
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

void sim_queue_destroy(sim *s)
{
  for (uint32_t i = 0; i < s->stream_count; i++) {
    sim_stream *stream = s->streams[i];
    for (uint64_t k = stream->executed + 1; k <= stream->enqueued; k++)
      if (op_at(stream, k)->kind == SIM_OP_GRAPH)
        sim_graph_drop(s, op_at(stream, k)->graph);
    free(stream->ops);
  }
  free(s->pending);
}
