/* capture.c: captures of streams from begin to end, and what the driver says about them
 * meanwhile. */
#include "capture.h"

#include <stdlib.h>

#include "base.h"
#include "graph.h"
#include "stream.h"

/* Takes every stream out of the capture; its nodes now mean nothing to others. */
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

/* Whether every node comes before the end of the stream that the capture began on. */
static int is_joined(const sim_stream *origin)
{
  for (uint32_t n = 0; n < origin->capture->count; n++)
    if (!sim_graph_is_after(origin->capture, &origin->tails, n))
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
    body->references += 2; /* one for the node, one for the list of bodies */
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

/* A node's handle consists of its capture and its number. */
static void *node_handle(const sim_graph *graph, uint32_t node)
{
  return (void *)(uintptr_t)(graph->id << 36 | (uint64_t)(node + 1) << 4);
}

/* NULL, after a report: its capture is over, where a real driver would crash. */
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

static esper_status store_nodes(const sim_graph *graph, const sim_nodes *nodes, void **handles,
                                size_t *count)
{
  if (nodes->count >= *count)
    return sim_refuse(ESPER_UNSUPPORTED, "sim: there are too many");
  *count = nodes->count;
  for (uint32_t i = 0; i < nodes->count; i++)
    handles[i] = node_handle(graph, nodes->at[i]);
  return ESPER_OK;
}

esper_status sim_tails_now(const sim_stream *stream, uint64_t capture, void **tails, size_t *count)
{
  return is_in(stream, capture) ? store_nodes(stream->capture, &stream->tails, tails, count)
                                : not_in();
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
  return store_nodes(graph, &graph->nodes[number].before, before, count);
}
