/* graph.h: graphs of nodes, including those of active captures. */
#ifndef ESPER_SIM_GRAPH_H
#define ESPER_SIM_GRAPH_H

#include "state.h"

sim_graph *sim_capture_find(sim *s, uint64_t id); /* NULL: there is no active capture of that id */
/* Whether the capture is active or a body of an active one. What other captures recorded runs at
 * launches, or never. */
int sim_capture_lasts(sim *s, uint64_t id);
/* The capture that the stream's operations go into. NULL: it is in none, or in an invalidated one,
 * where operations are lost. */
sim_graph *sim_capture_of(const sim_stream *stream);
/* Adds a node after everything of the stream in its capture, and returns its number. */
uint32_t sim_capture_add(sim *s, sim_stream *stream, const sim_op *op);
/* Whether what comes after those nodes of the graph comes after `node` of the capture. */
int sim_capture_is_after(sim *s, const sim_graph *graph, const sim_nodes *tails, uint64_t capture,
                         uint32_t node);
/* Whether what comes after those nodes of the graph comes after its `node`. */
int sim_graph_is_after(const sim_graph *graph, const sim_nodes *tails, uint32_t node);
int sim_graph_has_ancestor(const sim_graph *graph, uint32_t node, uint32_t ancestor);
void sim_capture_invalidate(sim *s, uint64_t id);
/* Invalidates every capture on the device; nonzero: there was one. */
int sim_captures_break(sim *s, int device);
void sim_nodes_copy(sim_nodes *to, const sim_nodes *from);
void sim_nodes_add(sim_nodes *to, const sim_nodes *from);
/* Drops a reference; the last one frees the graph. */
void sim_graph_drop(sim *s, sim_graph *graph);

#endif
