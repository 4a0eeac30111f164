/* graph.c: graphs of nodes, including those of active captures.
 *
 * While a stream is being captured, its operations become nodes that depend on the stream's last
 * ones. A node knows all its ancestors, so whether it comes after another is a single lookup. */
#include "graph.h"

#include <stdlib.h>

#include "base.h"

static size_t words(uint32_t nodes)
{
  return ((size_t)nodes + 63) / 64;
}

int sim_graph_has_ancestor(const sim_graph *graph, uint32_t node, uint32_t ancestor)
{
  return ancestor < node && (int)(graph->nodes[node].ancestors[ancestor / 64] >> ancestor % 64 & 1);
}

int sim_graph_is_after(const sim_graph *graph, const sim_nodes *tails, uint32_t node)
{
  for (uint32_t i = 0; i < tails->count; i++)
    if (tails->at[i] == node || sim_graph_has_ancestor(graph, tails->at[i], node))
      return 1;
  return 0;
}

/* A body is ordered like its node, for nodes inside and outside. */
int sim_capture_is_after(sim *s, const sim_graph *graph, const sim_nodes *tails, uint64_t capture,
                         uint32_t node)
{
  const sim_graph *here = graph;
  if (here->id == capture)
    return sim_graph_is_after(here, tails, node);
  for (; here->outer; here = here->outer)
    if (here->outer->id == capture)
      return sim_graph_has_ancestor(here->outer, here->outer_node, node);
  for (uint32_t i = 0; i < s->body_count; i++) {
    const sim_graph *body = s->bodies[i];
    if (body->id == capture)
      return sim_capture_is_after(s, graph, tails, body->outer->id, body->outer_node);
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

/* The ancestors of a new node that comes after `tails`. */
static uint64_t *ancestors_of(const sim_graph *graph, const sim_nodes *tails, uint32_t number)
{
  uint64_t *ancestors = calloc(words(number) + 1, sizeof *ancestors);
  if (!ancestors)
    abort();
  for (uint32_t i = 0; i < tails->count; i++) {
    uint32_t tail = tails->at[i];
    const sim_node *node = &graph->nodes[tail];
    ancestors[tail / 64] |= (uint64_t)1 << tail % 64;
    for (size_t w = 0; w < words(tail); w++)
      ancestors[w] |= node->ancestors[w];
  }
  return ancestors;
}

uint32_t sim_capture_add(sim *s, sim_stream *stream, const sim_op *op)
{
  (void)s;
  sim_graph *graph = stream->capture;
  uint32_t number = graph->count;
  graph->nodes = sim_grow32(graph->nodes, number, &graph->capacity, sizeof *graph->nodes);
  sim_node *node = &graph->nodes[number];
  node->op = *op;
  node->ancestors = ancestors_of(graph, &stream->tails, number);
  node->before = (sim_nodes){0};
  sim_nodes_add(&node->before, &stream->tails);
  graph->count++;
  sim_nodes_copy(&stream->tails, &(sim_nodes){1, 1, &number});
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
