/* copies.c: the driver's copies between device and host memory. They must come after everything
 * that was done to the bytes, and what slept must get its own contents back. */
#include "copies.h"

#include "base.h"
#include "contents.h"
#include "oracle.h"
#include "queue.h"
#include "stream.h"

/* Whether the copy comes after everything that was done to the bytes. */
static int is_ordered(sim *s, const char *who, const sim_stretch *t, const sim_stream *stream,
                      uintptr_t address)
{
  for (uint32_t k = 0; t->marks && k < t->marks->count; k++) {
    if (sim_mark_is_before(s, &t->marks->at[k], stream))
      continue;
    sim_report(s, "%s of memory at 0x%zx is not ordered after an access:\n", who, (size_t)address);
    sim_report_mark(s, &t->marks->at[k], stream);
    return 0;
  }
  return 1;
}

static int check_piece(sim *s, sim_op_kind kind, const sim_stream *stream, const sim_piece *p,
                       uintptr_t host)
{
  size_t first = sim_stretch_cut(p->physical, p->offset);
  size_t last = sim_stretch_cut(p->physical, p->offset + p->size);
  for (size_t i = first; i < last; i++) {
    sim_stretch *t = &p->physical->stretches[i];
    uintptr_t at = p->address + (t->begin - p->offset);
    if (kind == SIM_OP_TO_HOST) {
      if (!sim_contents_are_there(s, "a copy", t, stream, at) ||
          !is_ordered(s, "a copy", t, stream, at))
        return 0;
      continue;
    }
    uintptr_t from = host ? host + (at - p->address) : 0;
    int again = t->copy_index && t->copy == from; /* nobody has touched it since the last time */
    if (t->live && !t->absent && !again) {
      sim_report(s, "memory at 0x%zx that is live and awake is written over: ", (size_t)at);
      sim_report_owner(s, t->owner);
      sim_report(s, "\n");
      return 0;
    }
    if (t->absent && !sim_parked_come_back(s, at, t->end - t->begin, from, t->owner))
      return 0;
  }
  return 1;
}

static void note_piece(sim_op_kind kind, const sim_stream *stream, uint64_t index,
                       const sim_piece *p, uintptr_t host)
{
  size_t first = sim_stretch_cut(p->physical, p->offset);
  size_t last = sim_stretch_cut(p->physical, p->offset + p->size);
  for (size_t i = first; i < last; i++) {
    sim_stretch *t = &p->physical->stretches[i];
    t->copy = host ? host + (t->begin - p->offset) : 0;
    t->copy_slot = stream->slot;
    t->copy_index = index;
    t->absent = 0;
    if (kind != SIM_OP_TO_HOST) {
      t->fill_slot = stream->slot;
      t->fill_index = index;
    }
  }
}

esper_status sim_copy(sim *s, sim_op_kind kind, sim_stream *stream, uintptr_t address, void *host,
                      size_t size)
{
  const char *who = kind == SIM_OP_TO_HOST ? "copy_to_host"
                    : host                 ? "copy_to_device"
                                           : "memory_zero";
  uintptr_t at = (uintptr_t)host;
  if (stream->capture || (host && !sim_host_has(s, host, size))) {
    sim_report(s, "%s: the stream is captured, or the host memory is not the driver's\n", who);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: %s: bad arguments", who);
  }
  if (kind == SIM_OP_TO_HOST) {
    if (!sim_host_is_idle(s, who, at, size))
      return sim_refuse(ESPER_DEVICE_ERROR, "sim: %s over a copy", who);
    sim_host_forget_copies(s, at, size);
  }
  sim_piece p;
  for (uintptr_t a = address; s->options.oracle && a < address + size; a += p.size)
    if (!sim_piece_at(s, who, stream->device, a, address + size, &p) ||
        !check_piece(s, kind, stream, &p, host ? at + (a - address) : 0))
      return sim_refuse(ESPER_DEVICE_ERROR, "sim: %s: bad addresses", who);
  sim_op op = {.kind = kind, .address = address, .size = size, .host = host};
  uint64_t index = sim_enqueue(s, stream, &op);
  sim_stream_given(stream);
  if (!s->options.oracle)
    return ESPER_OK;
  for (uintptr_t a = address; a < address + size; a += p.size) {
    sim_piece_at(s, who, stream->device, a, address + size, &p);
    note_piece(kind, stream, index, &p, host ? at + (a - address) : 0);
  }
  sim_oracle_mark(s, stream, index, address, size);
  return ESPER_OK;
}
