#include "graph.h"

#include <stdint.h>
#include <string.h>

/* A byte makes at most one value, and two places in the memo. */
enum { MOST = 2 * GRAPH_BYTES, KEY_ENOUGH = 1 << 20 };
enum { NO_VALUE = -1, SCALAR = -2 }; /* else a node's number */

typedef struct edge {
  int to, next;
  bool key;
} edge;

typedef struct node {
  char kind; /* t, l or d */
  char walk; /* 0: not yet; 1: its parts are being walked; 2: done */
  int edges; /* the last one, -1: none */
  size_t depth, key_size;
} node;

typedef struct graph {
  const unsigned char *data;
  size_t size, at;
  node nodes[MOST];
  edge edges[MOST];
  int stack[MOST], marks[MOST], memo[MOST];
  int node_count, edge_count, height, mark_count, memo_count;
} graph;

/* Too large for a stack, and to be zeroed for each input. */
static graph the_graph;

static bool push(graph *g, int value)
{
  g->stack[g->height++] = value;
  return true;
}

/* Values that may be taken before the last mark is in the way. */
static int available(const graph *g)
{
  return g->mark_count ? g->height - g->marks[g->mark_count - 1] : g->height;
}

static int node_add(graph *g, char kind)
{
  g->nodes[g->node_count] = (node){.kind = kind, .edges = -1};
  return g->node_count++;
}

/* The container takes the `count` values on top of the stack. */
static bool take(graph *g, int into, int count)
{
  if (g->nodes[into].kind == 'd' && count % 2 != 0)
    return false;
  for (int i = 0; i < count; i++) {
    g->edges[g->edge_count] = (edge){.to = g->stack[g->height - count + i],
                                     .next = g->nodes[into].edges,
                                     .key = g->nodes[into].kind == 'd' && i % 2 == 0};
    g->nodes[into].edges = g->edge_count++;
  }
  g->height -= count;
  return true;
}

static bool make(graph *g, char kind, int count)
{
  if (count < 0 || available(g) < count)
    return false;
  int made = node_add(g, kind);
  return take(g, made, count) && push(g, made);
}

/* The values on top go into the container below them. */
static bool add(graph *g, char kind, int count)
{
  if (count < 0 || available(g) < count + 1)
    return false;
  if (count == 0)
    return true;
  int into = g->stack[g->height - count - 1];
  return into >= 0 && g->nodes[into].kind == kind && take(g, into, count);
}

/* How many values stand above the last mark, which goes; -1: there is none. */
static int unmark(graph *g)
{
  if (g->mark_count == 0)
    return -1;
  return g->height - g->marks[--g->mark_count];
}

static bool skip(graph *g, uint64_t count)
{
  if (g->size - g->at < count)
    return false;
  g->at += (size_t)count;
  return true;
}

static bool number(graph *g, int width, uint64_t *value)
{
  const unsigned char *bytes = g->data + g->at;
  if (!skip(g, (uint64_t)width))
    return false;
  *value = 0;
  while (width-- > 0)
    *value = *value << 8 | bytes[width];
  return true;
}

static bool counted(graph *g, int width)
{
  uint64_t length = 0;
  return number(g, width, &length) && skip(g, length) && push(g, SCALAR);
}

static bool line(graph *g, uint64_t *value)
{
  *value = 0;
  for (size_t digits = 0; g->at < g->size; digits++) {
    unsigned char byte = g->data[g->at++];
    if (byte == '\n')
      return digits > 0 && *value < MOST;
    if (byte < '0' || byte > '9' || digits == 18) /* no pickler writes more */
      return false;
    *value = *value < MOST ? *value * 10 + (byte - '0') : MOST;
  }
  return false;
}

static bool text(graph *g)
{
  while (g->at < g->size) {
    if (g->data[g->at++] == '\n')
      return push(g, SCALAR);
  }
  return false;
}

static bool put(graph *g, bool readable, uint64_t index)
{
  if (!readable || available(g) == 0 || index >= MOST)
    return false;
  g->memo_count += g->memo[index] == NO_VALUE;
  g->memo[index] = g->stack[g->height - 1];
  return true;
}

static bool get(graph *g, bool readable, uint64_t index)
{
  return readable && index < MOST && g->memo[index] != NO_VALUE && push(g, g->memo[index]);
}

static bool pop(graph *g)
{
  if (available(g) > 0)
    g->height--;
  else if (g->mark_count > 0)
    g->mark_count--;
  else
    return false;
  return true;
}

static bool obey(graph *g, unsigned char code)
{
  uint64_t index = 0;
  bool readable;
  int count;
  switch (code) {
  case '.': return available(g) > 0;
  case 'N':
  case 0x88:
  case 0x89: return push(g, SCALAR);
  case 'K': return skip(g, 1) && push(g, SCALAR);
  case 'M': return skip(g, 2) && push(g, SCALAR);
  case 'J': return skip(g, 4) && push(g, SCALAR);
  case 'G': return skip(g, 8) && push(g, SCALAR);
  case 'I':
  case 'L':
  case 'F':
  case 'S':
  case 'V': return text(g);
  case 'U':
  case 'C':
  case 0x8a:
  case 0x8c: return counted(g, 1);
  case 'T':
  case 'B':
  case 'X':
  case 0x8b: return counted(g, 4);
  case 0x8d:
  case 0x8e: return counted(g, 8);
  case 0x80: return skip(g, 1);
  case 0x95: return skip(g, 8);
  case ')': return make(g, 't', 0);
  case ']': return make(g, 'l', 0);
  case '}': return make(g, 'd', 0);
  case 0x85: return make(g, 't', 1);
  case 0x86: return make(g, 't', 2);
  case 0x87: return make(g, 't', 3);
  case 't': return make(g, 't', unmark(g));
  case 'l': return make(g, 'l', unmark(g));
  case 'd': return make(g, 'd', unmark(g));
  case 'a': return add(g, 'l', 1);
  case 's': return add(g, 'd', 2);
  case 'e': return add(g, 'l', unmark(g));
  case 'u': return add(g, 'd', unmark(g));
  case '(': g->marks[g->mark_count++] = g->height; return true;
  case '0': return pop(g);
  case '1':
    count = unmark(g);
    g->height -= count < 0 ? 0 : count;
    return count >= 0;
  case '2': return available(g) > 0 && push(g, g->stack[g->height - 1]);
  case 'h': readable = number(g, 1, &index); return get(g, readable, index);
  case 'j': readable = number(g, 4, &index); return get(g, readable, index);
  case 'g': readable = line(g, &index); return get(g, readable, index);
  case 'q': readable = number(g, 1, &index); return put(g, readable, index);
  case 'r': readable = number(g, 4, &index); return put(g, readable, index);
  case 'p': readable = line(g, &index); return put(g, readable, index);
  case 0x94: return put(g, true, (uint64_t)g->memo_count);
  default: return false;
  }
}

/* Fills in a node's depth and size as a key, and those of all that it holds. */
static void walk(graph *g, int number, graph_facts *facts)
{
  node *n = &g->nodes[number];
  n->walk = 1;
  n->depth = n->key_size = 1;
  for (int e = n->edges; e >= 0; e = g->edges[e].next) {
    size_t key_size = 1;
    if (g->edges[e].to >= 0) {
      node *part = &g->nodes[g->edges[e].to];
      if (part->walk == 0)
        walk(g, g->edges[e].to, facts);
      if (part->walk == 1)
        facts->circular = true;
      if (n->depth < part->depth + 1)
        n->depth = part->depth + 1;
      if (part->kind == 't') /* nothing else can be hashed */
        key_size = part->key_size;
    }
    n->key_size += key_size;
    if (n->key_size > KEY_ENOUGH)
      n->key_size = KEY_ENOUGH;
    if (g->edges[e].key && facts->key_size < key_size)
      facts->key_size = key_size;
  }
  n->walk = 2;
  if (facts->depth < n->depth)
    facts->depth = n->depth;
}

graph_facts graph_read(const unsigned char *data, size_t size, size_t last)
{
  graph *g = &the_graph;
  g->data = data;
  g->size = size;
  g->at = 0;
  g->node_count = g->edge_count = g->height = g->mark_count = g->memo_count = 0;
  memset(g->memo, NO_VALUE, sizeof g->memo);

  graph_facts facts = {.end = GRAPH_IMPOSSIBLE};
  while (g->at < size && facts.end == GRAPH_IMPOSSIBLE) {
    facts.at = g->at;
    unsigned char code = data[g->at++];
    if (!obey(g, code))
      break;
    if (code == '.')
      facts.end = GRAPH_STOPPED;
    else if (facts.at == last)
      facts.end = GRAPH_PAUSED;
  }
  for (int number = 0; number < g->node_count; number++) {
    if (g->nodes[number].walk == 0)
      walk(g, number, &facts);
  }
  return facts;
}
