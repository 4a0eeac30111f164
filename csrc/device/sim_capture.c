/* sim_capture.c: captures as graphs of nodes.
 *
 * While a stream is being captured its operations become nodes that depend on
 * the stream's last ones. A node knows all its ancestors, so whether one comes
 * after another is one look. */
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

static size_t words(uint32_t nodes)
{
  return ((size_t)nodes + 63) / 64;
}

static int has_ancestor(const sim_graph *graph, uint32_t node, uint32_t ancestor)
{
  if (ancestor >= node)
    return 0;
  return (int)(graph->nodes[node].ancestors[ancestor / 64] >> ancestor % 64 & 1);
}

static int is_after(const sim_stream *stream, uint32_t node)
{
  for (uint32_t i = 0; i < stream->tails.count; i++) {
    uint32_t tail = stream->tails.at[i];
    if (tail == node || has_ancestor(stream->capture, tail, node))
      return 1;
  }
  return 0;
}

/* A body is ordered as its node is, from inside and from outside. */
int sim_capture_is_after(sim *s, const sim_stream *stream, uint64_t capture, uint32_t node)
{
  const sim_graph *here = stream->capture;
  if (here->id == capture)
    return is_after(stream, node);
  for (; here->outer; here = here->outer)
    if (here->outer->id == capture)
      return has_ancestor(here->outer, here->outer_node, node);
  for (uint32_t i = 0; i < s->body_count; i++) {
    const sim_graph *body = s->bodies[i];
    if (body->id == capture)
      return sim_capture_is_after(s, stream, body->outer->id, body->outer_node);
  }
  return 0;
}

sim_graph *sim_capture_of(const sim_stream *stream)
{
  return stream->capture && !stream->capture->invalid ? stream->capture : NULL;
}

void sim_nodes_copy(sim_nodes *to, const sim_nodes *from)
{
  to->count = 0;
  sim_nodes_add(to, from);
}

void sim_nodes_add(sim_nodes *to, const sim_nodes *from)
{
  for (uint32_t i = 0; i < from->count; i++) {
    uint32_t k = 0;
    while (k < to->count && to->at[k] != from->at[i])
      k++;
    if (k < to->count)
      continue;
    to->at = sim_grow32(to->at, to->count, &to->capacity, sizeof *to->at);
    to->at[to->count++] = from->at[i];
  }
}

uint32_t sim_capture_add(sim *s, sim_stream *stream, const sim_op *op)
{
  (void)s;
  sim_graph *graph = stream->capture;
  uint32_t number = graph->count;
  graph->nodes = sim_grow32(graph->nodes, number, &graph->capacity, sizeof *graph->nodes);
  sim_node *node = &graph->nodes[number];
  node->op = *op;
  node->ancestors = calloc(words(number) + 1, sizeof *node->ancestors);
  if (!node->ancestors)
    abort();
  node->before = (sim_nodes){0};
  sim_nodes_add(&node->before, &stream->tails);
  for (uint32_t i = 0; i < stream->tails.count; i++) {
    uint32_t tail = stream->tails.at[i];
    node->ancestors[tail / 64] |= (uint64_t)1 << tail % 64;
    for (size_t w = 0; w < words(tail); w++)
      node->ancestors[w] |= graph->nodes[tail].ancestors[w];
  }
  graph->count++;
  stream->tails.count = 0;
  sim_nodes_add(&stream->tails, &(sim_nodes){1, 1, &number});
  return number;
}

sim_graph *sim_capture_find(sim *s, uint64_t id)
{
  for (uint32_t i = 0; i < s->capture_count; i++)
    if (s->captures[i]->id == id)
      return s->captures[i];
  return NULL;
}

int sim_capture_lasts(sim *s, uint64_t id)
{
  const sim_graph *active = sim_capture_find(s, id);
  if (active)
    return !active->invalid;
  for (uint32_t i = 0; i < s->body_count; i++)
    if (s->bodies[i]->id == id)
      return sim_capture_lasts(s, s->bodies[i]->outer->id);
  return 0;
}

void sim_capture_invalidate(sim *s, uint64_t id)
{
  sim_graph *graph = sim_capture_find(s, id);
  if (graph)
    graph->invalid = 1;
}

int sim_captures_break(sim *s, int device)
{
  int broken = 0;
  for (uint32_t i = 0; s->capture_count && i < s->stream_count; i++)
    if (s->streams[i]->device == device && s->streams[i]->capture) {
      sim_capture_invalidate(s, s->streams[i]->capture->id);
      broken = 1;
    }
  return broken;
}

void sim_graph_drop(sim *s, sim_graph *graph)
{
  if (--graph->references)
    return;
  for (uint32_t i = 0; i < graph->count; i++) {
    free(graph->nodes[i].ancestors);
    free(graph->nodes[i].before.at);
    if (graph->nodes[i].op.kind == SIM_OP_GRAPH)
      sim_graph_drop(s, graph->nodes[i].op.graph);
  }
  free(graph->nodes);
  free(graph);
}

/* No stream is in the capture any more; its nodes mean nothing to others. */
static void deactivate(sim *s, sim_graph *graph)
{
  for (uint32_t i = 0; i < s->stream_count; i++)
    if (s->streams[i]->capture == graph) {
      s->streams[i]->capture = NULL;
      s->streams[i]->tails.count = 0;
    }
  for (uint32_t i = 0; i < s->capture_count; i++)
    if (s->captures[i] == graph) {
      s->captures[i] = s->captures[--s->capture_count];
      break;
    }
  graph->active = 0;
  for (uint32_t i = s->body_count; i-- > 0;)
    if (s->bodies[i]->outer == graph) {
      sim_graph *body = s->bodies[i];
      s->bodies[i] = s->bodies[--s->body_count];
      body->outer = NULL;
      sim_graph_drop(s, body);
    }
}

/* Every node comes before the end of the stream that the capture began on. */
static int is_joined(const sim_stream *origin)
{
  for (uint32_t n = 0; n < origin->capture->count; n++)
    if (!is_after(origin, n))
      return 0;
  return 1;
}

static sim_graph *capture_on(sim *s, sim_stream *stream)
{
  sim_graph *graph = calloc(1, sizeof *graph);
  if (!graph)
    abort();
  graph->id = s->next_capture_id++;
  graph->active = 1;
  graph->origin = stream->slot;
  graph->references = 1;
  s->captures =
      sim_grow32(s->captures, s->capture_count, &s->capture_capacity, sizeof *s->captures);
  s->captures[s->capture_count++] = graph;
  stream->capture = graph;
  stream->tails.count = 0;
  return graph;
}

uint64_t sim_capture_begin(sim *s, int device, void *handle)
{
  uint64_t id = 0;
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_capture_begin");
  if (stream && stream->capture)
    sim_report(s, "sim_capture_begin: the stream is being captured already\n");
  else if (stream)
    id = capture_on(s, stream)->id;
  sim_leave(s);
  return id;
}

uint64_t sim_capture_body(sim *s, int device, void *outer, void *handle)
{
  uint64_t id = 0;
  sim_enter(s);
  sim_stream *from = sim_stream_find(s, device, outer, "sim_capture_body");
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_capture_body");
  if (from && stream && (!sim_capture_of(from) || stream->capture)) {
    sim_report(s, "sim_capture_body: a stream that is being captured, and one "
                  "that is not, are needed\n");
  } else if (from && stream) {
    sim_graph *body = capture_on(s, stream);
    id = body->id;
    body->references += 2; /* the node's, and of the list of bodies */
    body->group = from->capture->group;
    body->outer = from->capture;
    body->outer_node = sim_capture_add(s, from, &(sim_op){.kind = SIM_OP_GRAPH, .graph = body});
    s->bodies = sim_grow32(s->bodies, s->body_count, &s->body_capacity, sizeof *s->bodies);
    s->bodies[s->body_count++] = body;
  }
  sim_leave(s);
  return id;
}

void sim_capture_group(sim *s, int device, void *handle, uint64_t group)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_capture_group");
  if (stream && stream->capture)
    stream->capture->group = group;
  else if (stream)
    sim_report(s, "sim_capture_group: the stream is not being captured\n");
  sim_leave(s);
}

static sim_graph *end(sim *s, int device, void *handle, const char *who, int *joined)
{
  sim_stream *stream = sim_stream_find(s, device, handle, who);
  if (!stream)
    return NULL;
  if (!stream->capture || stream->capture->origin != stream->slot) {
    sim_report(s, "%s: no capture began on this stream\n", who);
    return NULL;
  }
  sim_graph *graph = stream->capture;
  *joined = is_joined(stream);
  deactivate(s, graph);
  return graph;
}

sim_graph *sim_capture_end(sim *s, int device, void *handle)
{
  int joined = 0;
  sim_enter(s);
  sim_graph *graph = end(s, device, handle, "sim_capture_end", &joined);
  if (graph && (graph->invalid || !joined || graph->outer)) {
    sim_graph_drop(s, graph);
    graph = NULL;
  }
  sim_leave(s);
  return graph;
}

void sim_capture_abort(sim *s, int device, void *handle)
{
  int joined;
  sim_enter(s);
  sim_graph *graph = end(s, device, handle, "sim_capture_abort", &joined);
  if (graph)
    sim_graph_drop(s, graph);
  sim_leave(s);
}

int sim_capture_is_valid(sim *s, int device, void *handle)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_capture_is_valid");
  int valid = stream && stream->capture && !stream->capture->invalid;
  sim_leave(s);
  return valid;
}

/* The graph's accesses, by an operation or by a node of the stream's capture. */
static void note_accesses(sim *s, const sim_graph *graph, sim_stream *stream, uint64_t index,
                          uint32_t node)
{
  for (uint32_t i = 0; s->options.oracle && i < graph->count; i++) {
    const sim_op *op = &graph->nodes[i].op;
    if (op->kind == SIM_OP_GRAPH)
      note_accesses(s, op->graph, stream, index, node);
    else if (op->size)
      sim_oracle_access(s, stream, index, node, op->address, op->size, op->owner);
  }
}

void sim_graph_launch(sim *s, sim_graph *graph, int device, void *handle)
{
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_graph_launch");
  sim_op op = {.kind = SIM_OP_GRAPH, .graph = graph};
  if (stream && sim_capture_of(stream)) {
    graph->references++;
    uint32_t node = sim_capture_add(s, stream, &op);
    note_accesses(s, graph, stream, 0, node);
  } else if (stream && !stream->capture) {
    graph->references++;
    uint64_t index = sim_enqueue(s, stream, &op);
    note_accesses(s, graph, stream, index, SIM_NONE);
  }
  sim_leave(s);
}

size_t sim_graph_nodes(const sim_graph *graph)
{
  return graph->count;
}

void sim_graph_destroy(sim *s, sim_graph *graph)
{
  sim_enter(s);
  sim_graph_drop(s, graph);
  sim_leave(s);
}

void sim_capture_destroy_all(sim *s)
{
  while (s->capture_count) {
    sim_graph *graph = s->captures[0];
    deactivate(s, graph);
    sim_graph_drop(s, graph);
  }
  free(s->captures);
  free(s->bodies);
}

/* ---- what the driver says of captures ------------------------------------ */

/* A node's handle: of its capture, then its number. */
static void *node_handle(const sim_graph *graph, uint32_t node)
{
  return (void *)(uintptr_t)(graph->id << 36 | (uint64_t)(node + 1) << 4);
}

/* NULL, after a report: its capture is over, and the driver would crash. */
static sim_graph *node_find(sim *s, void *handle, uint32_t *node, const char *who)
{
  uint64_t bits = (uintptr_t)handle;
  sim_graph *graph = sim_capture_find(s, bits >> 36);
  *node = (uint32_t)(bits >> 4) - 1;
  if (graph && !graph->invalid && *node < graph->count)
    return graph;
  sim_report(s, "%s: %p is no node of an active capture\n", who, handle);
  return NULL;
}

static int is_in(const sim_stream *stream, uint64_t capture)
{
  const sim_graph *graph = sim_capture_of(stream);
  return graph && graph->id == capture;
}

static esper_status not_in(void)
{
  return sim_refuse(ESPER_INVALID, "sim: the stream is not in that capture");
}

esper_status sim_point_now(sim *s, sim_stream *stream, uint64_t capture, void **node)
{
  if (!is_in(stream, capture))
    return not_in();
  *node = NULL;
  sim_graph *graph = stream->capture;
  sim_nodes *tails = &stream->tails;
  for (uint32_t i = 0; i < tails->count; i++) {
    uint32_t k = 0;
    while (k < tails->count && (k == i || has_ancestor(graph, tails->at[i], tails->at[k])))
      k++;
    if (k < tails->count)
      continue;
    *node = node_handle(graph, tails->at[i]);
    return ESPER_OK;
  }
  if (tails->count) {
    sim_nodes before = {0};
    sim_nodes_copy(&before, tails);
    *node = node_handle(graph, sim_capture_add(s, stream, &(sim_op){.kind = SIM_OP_WAIT}));
    sim_nodes_add(tails, &before);
    free(before.at);
  }
  return ESPER_OK;
}

esper_status sim_depend_now(sim *s, sim_stream *stream, uint64_t capture, void *node)
{
  uint32_t number;
  if (!is_in(stream, capture))
    return not_in();
  if (node_find(s, node, &number, "capture_depend") != stream->capture)
    return not_in();
  sim_nodes_add(&stream->tails, &(sim_nodes){1, 1, &number});
  return ESPER_OK;
}

esper_status sim_before_now(sim *s, const sim_stream *stream, uint64_t capture, void *node,
                            void **before, size_t *count)
{
  uint32_t number;
  if (!is_in(stream, capture))
    return not_in();
  sim_graph *graph = node_find(s, node, &number, "capture_before");
  if (graph != stream->capture)
    return not_in();
  const sim_nodes *nodes = &graph->nodes[number].before;
  if (nodes->count >= *count)
    return sim_refuse(ESPER_UNSUPPORTED, "sim: there are too many");
  *count = nodes->count;
  for (uint32_t i = 0; i < nodes->count; i++)
    before[i] = node_handle(graph, nodes->at[i]);
  return ESPER_OK;
}
