/* accesses.h: the accesses to physical memory that may still be running. */
#ifndef ESPER_SIM_ACCESSES_H
#define ESPER_SIM_ACCESSES_H

#include "state.h"

/* The node of a mark by a graph's replay, which is an operation. */
enum { SIM_REPLAYED = SIM_NONE - 1 };

typedef struct sim_mark {
  uint32_t slot;  /* SIM_NONE: a node of a capture */
  uint32_t node;  /* the node; SIM_REPLAYED: the operation is a graph's replay */
  uint64_t index; /* operation of the slot, or id of the capture */
  uint64_t owner;
  uintptr_t mapping; /* where the memory begins at which it was accessed */
} sim_mark;

struct sim_marks {
  uint32_t references, count, order; /* room for 1 << order */
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
/* Frees the sets that are kept for later. */
void sim_marks_destroy(sim *s);
/* The mark can no longer matter to anybody. */
int sim_mark_is_over(sim *s, const sim_mark *mark);
/* What the stream does next comes after the mark. */
int sim_mark_is_before(sim *s, const sim_mark *mark, const sim_stream *stream);

/* Where the owner of that number is noted, or a later one by now. */
sim_owner *sim_owner_slot(const sim *s, uint64_t id);
void sim_report_stream(sim *s, const sim_stream *stream);
void sim_report_owner(sim *s, uint64_t id);
void sim_report_mark(sim *s, const sim_mark *mark, const sim_stream *stream);

void sim_physical_init(sim *s, sim_physical *physical);
void sim_physical_destroy(sim *s, sim_physical *physical);
/* Nonzero: an access to the memory is not over for the host, or it has a live
 * owner. Reports, naming `who`. */
int sim_physical_is_busy(sim *s, sim_physical *physical, uintptr_t address, const char *who);
/* The stretch that holds `offset`. */
size_t sim_stretch_at(const sim_physical *p, size_t offset);
/* Makes a stretch begin at `offset`, and says which. */
size_t sim_stretch_cut(sim_physical *p, size_t offset);
/* Joins what is equal in and around the stretches from first to last. */
void sim_stretch_join(sim *s, sim_physical *p, size_t first, size_t last);
/* The piece that begins at `address`; 0, after a report by `who`, when there is
 * no memory of the device (-1: of any). */
int sim_piece_at(sim *s, const char *who, int device, uintptr_t address, uintptr_t end,
                 sim_piece *p);

#endif
