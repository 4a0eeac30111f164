/* graph.h: a second, plain reading of a pickle, to compare the check's with.
 *
 * It builds every container as a node with edges to what it holds, keeps all of
 * them, and walks the whole graph afterwards. It has no table of opcodes and no
 * depth of its own while it builds: it shares nothing with csrc/pickle. */
#ifndef ESPER_FUZZ_GRAPH_H
#define ESPER_FUZZ_GRAPH_H

#include <stdbool.h>
#include <stddef.h>

/* Longer pickles do not fit. */
#define GRAPH_BYTES 4096

typedef enum graph_end {
  GRAPH_STOPPED,   /* at the pickle's end */
  GRAPH_PAUSED,    /* after the opcode at `last` */
  GRAPH_IMPOSSIBLE /* something that no loader can do, or that is no plain data */
} graph_end;

typedef struct graph_facts {
  graph_end end;
  size_t at;       /* the opcode that it ended with */
  bool circular;   /* a container can be reached from itself */
  size_t depth;    /* the most levels of containers; where not circular */
  size_t key_size; /* the most values in a key, each tuple counting as one too */
} graph_facts;

/* Obeys the opcodes up to the one at `last`, or to the pickle's end. */
graph_facts graph_read(const unsigned char *data, size_t size, size_t last);

#endif
