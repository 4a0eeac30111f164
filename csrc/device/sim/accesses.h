/* accesses.h: the accesses to physical memory that may still be running. */
#ifndef ESPER_SIM_ACCESSES_H
#define ESPER_SIM_ACCESSES_H

#include "state.h"

/* `node` of a mark that an operation made by replaying a graph. */
enum { SIM_REPLAYED = SIM_NONE - 1 };

typedef struct sim_mark {
  uint32_t slot;  /* stream's slot; SIM_NONE: the mark is a node's */
  uint32_t node;  /* the node; SIM_REPLAYED: a graph's replay */
  uint64_t index; /* the slot's operation, or the capture's id */
  uint64_t owner;
  uintptr_t mapping; /* address of the mapping used for the access */
} sim_mark;

struct sim_marks {
  uint32_t references, count, order; /* capacity: 1 << order */
  sim_marks *next_free;
  sim_mark at[];
};

/* A piece of an address range that lies in one physical allocation. */
typedef struct sim_piece {
  sim_physical *physical;
  uintptr_t address;
  size_t offset, size;
} sim_piece;

sim_marks *sim_marks_new(sim *s, uint32_t count);
void sim_marks_drop(sim *s, sim_marks *marks);
/* Frees the sets that were kept for reuse. */
void sim_marks_destroy(sim *s);
/* Whether the mark can no longer matter to anybody. */
int sim_mark_is_over(sim *s, const sim_mark *mark);
/* Work that is yet to come: after `clock` or, in a capture, after the graph's `tails`. */
typedef struct sim_future {
  const sim_clock *clock;
  const sim_graph *capture; /* NULL: none */
  const sim_nodes *tails;
  uint64_t group;
} sim_future;

/* The stream's next operation. */
sim_future sim_future_of(const sim_stream *stream);
/* Whether it comes after the mark. */
int sim_mark_is_before_future(sim *s, const sim_mark *mark, const sim_future *future);
/* Whether the stream's next operation comes after the mark. */
int sim_mark_is_before(sim *s, const sim_mark *mark, const sim_stream *stream);

/* The entry of the owner of that number, or by now of a later owner. */
sim_owner *sim_owner_slot(const sim *s, uint64_t id);
void sim_report_stream(sim *s, const sim_stream *stream);
void sim_report_owner(sim *s, uint64_t id);
void sim_report_mark(sim *s, const sim_mark *mark, const sim_stream *stream);

void sim_physical_init(sim *s, sim_physical *physical);
void sim_physical_destroy(sim *s, sim_physical *physical);
/* Whether the live owner has the page at this address. A page mapped at several addresses may be in
 * use at another one. */
int sim_is_behind(const sim *s, const sim_physical *p, uintptr_t address, uint64_t owner);
/* Nonzero: the memory has a live owner, or the host does not know that an access to it is over.
 * Reports that, naming `who`. */
int sim_physical_is_busy(sim *s, sim_physical *physical, uintptr_t address, const char *who);
/* Reports, naming `who`, and returns 0 if the stream's next operation may find the stretch's bytes
 * not back yet. */
int sim_contents_are_there(sim *s, const char *who, const sim_stretch *t, const sim_stream *stream,
                           uintptr_t address);
/* The stretch that holds `offset`. */
size_t sim_stretch_at(const sim_physical *p, size_t offset);
/* Makes a stretch begin at `offset` and returns its number. */
size_t sim_stretch_cut(sim_physical *p, size_t offset);
/* Joins equal neighbours in and around the stretches from first to last. */
void sim_stretch_join(sim *s, sim_physical *p, size_t first, size_t last);
/* Finds the piece that begins at `address`. Reports, naming `who`, and returns 0 if the device (-1:
 * any) has no memory there. */
int sim_piece_at(sim *s, const char *who, int device, uintptr_t address, uintptr_t end,
                 sim_piece *p);

#endif
