/* launch.c: the kernels and graphs that the program launches. The oracle is told which bytes they
 * access. */
#include "address.h"
#include "base.h"
#include "graph.h"
#include "oracle.h"
#include "queue.h"
#include "stream.h"

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
    sim_stream_given(stream);
    if (size && s->options.oracle)
      sim_oracle_access(s, stream, index, node, (uintptr_t)address, size, 0);
  }
  sim_leave(s);
}

/* Notes the graph's accesses, by an operation or by a node of the stream's capture. */
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
    sim_stream_given(stream);
    note_accesses(s, graph, stream, index, SIM_NONE);
  }
  sim_leave(s);
}
