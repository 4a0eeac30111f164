/* graphs.c: captures and replays. */
#include "graphs.h"

#include <stdlib.h>

#include "blocks.h"
#include "captured.h"
#include "causes.h"
#include "order.h"

static block *live_block(const audit *a, uintptr_t address, uint64_t serial)
{
  block *b = table_get(&a->blocks, address);
  return b && b->serial == serial ? b : NULL;
}

void audit_capture_began(audit *a, audit_stream where)
{
  stream *s = order_stream(a, where);
  if (!s || s->capture)
    return;
  capture *c = audit_new(sizeof *c);
  if (!c || !table_put(&a->captures, a->capture_ids + 1, c)) {
    a->lost = 1;
    free(c);
    return;
  }
  c->id = ++a->capture_ids;
  order_join_capture(a, s, c);
}

static void capture_free(capture *c)
{
  free(c->accesses);
  free(c->blocks);
  free(c);
}

static void graph_free(graph *g)
{
  free(g->accesses);
  free(g->blocks);
  free(g);
}

/* What is live keeps its contents from replay to replay, and serves nothing else. What was freed
 * inside nobody can name any more. */
static void keep_live_blocks(audit *a, capture *c)
{
  size_t kept = 0;
  for (size_t i = 0; i < c->block_count; i++) {
    block *b = live_block(a, c->blocks[i].address, c->blocks[i].serial);
    if (!b)
      continue;
    watched_disown(a, b);
    c->blocks[kept++] = c->blocks[i];
  }
  c->block_count = kept;
}

void audit_capture_ended(audit *a, audit_stream where, uint64_t name)
{
  stream *s = order_stream(a, where);
  capture *c = s ? s->capture : NULL;
  if (!c)
    return;
  for (size_t i = 0; i < a->stream_count; i++)
    if (a->streams[i]->capture == c) {
      causes_forget(a, &a->streams[i]->branch);
      order_leave_capture(a, a->streams[i]);
    }
  table_remove(&a->captures, c->id);
  keep_live_blocks(a, c);
  audit_graph_destroyed(a, name); /* an earlier one of that name */
  graph *g = name ? audit_new(sizeof *g) : NULL;
  if (g && (!table_put(&a->graphs, name, g) || !table_put(&a->owners, c->id, g))) {
    table_remove(&a->graphs, name);
    free(g);
    g = NULL;
  }
  if (!g) {
    a->lost |= name != 0;
    capture_free(c);
    return;
  }
  *g = (graph){c->accesses, c->blocks, c->count, c->block_count, .capture = c->id};
  free(c);
}

void audit_replayed(audit *a, uint64_t name, audit_stream where, audit_place place)
{
  graph *g = table_get(&a->graphs, name);
  stream *s = g ? order_stream(a, where) : NULL;
  if (!s)
    return;
  g->generation++;
  g->last = (audit_point){place, where, 1, 0};
  for (size_t i = 0; i < g->count; i++) {
    const captured_access *old = &g->accesses[i];
    block *b = live_block(a, old->address, old->serial);
    const audit_access access = {old->address, 0, old->bytes, where, old->writes, place, 0, 0};
    if (b && s->capture)
      graph_capture_access(a, s->capture, b, &access);
    else if (b)
      watched_touch(a, b, s, &access);
  }
  for (size_t i = 0; i < g->block_count; i++) {
    block *b = live_block(a, g->blocks[i].address, g->blocks[i].serial);
    if (!b)
      continue;
    const size_t size = b->size ? b->size : UINTPTR_MAX - b->address;
    const audit_access access = {b->address, 0, {b->address, size, 0, 0}, where, 1, place, 0, 0};
    if (s->capture)
      graph_capture_access(a, s->capture, b, &access);
    else
      watched_touch(a, b, s, &access);
  }
}

void audit_graph_destroyed(audit *a, uint64_t name)
{
  graph *g = table_remove(&a->graphs, name);
  if (!g)
    return;
  table_remove(&a->owners, g->capture);
  graph_free(g);
}

void graphs_destroy(audit *a)
{
  for (size_t i = 0; i < a->captures.capacity; i++)
    if (a->captures.at[i].value)
      capture_free(a->captures.at[i].value);
  for (size_t i = 0; i < a->graphs.capacity; i++)
    if (a->graphs.at[i].value)
      graph_free(a->graphs.at[i].value);
  table_clear(&a->captures);
  table_clear(&a->graphs);
  table_clear(&a->owners);
}
