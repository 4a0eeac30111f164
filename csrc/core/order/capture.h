/* capture.h: what comes before what inside a capture.
 *
 * A capture is a graph in the making. A stream inside one is a *branch*: like a
 * stream outside it numbers its *points*, the nodes at which the core looked at
 * it, and has a frontier: the highest point of each other branch that its
 * future nodes come after. The frontier rises when the branch is made to depend
 * on a point, and when a walk back from the branch's last node meets one. What
 * the walk does not reach is not known to come before, which only withholds.
 *
 * Places are uses (use.h): a mark inside a capture, and a free, which is the
 * owner order of a block that was handed out there. They mean nothing outside.
 *
 * Captures are counted by the uses and heaps that refer to them and go with the
 * last. A branch's numbers are under its stream's record lock. */
#ifndef ESPER_CAPTURE_H
#define ESPER_CAPTURE_H

#include "stream.h"

/* A point in a capture: what the branch's stream had recorded by then. */
typedef struct capture_point {
  branch_t *branch; /* NULL: none; a reference */
  uint64_t number;  /* of the branch; 0: before everything */
  void *node;
} capture_point_t;

enum { BRANCHES = 32 }; /* branches with a higher index have no frontier row */

struct branch {
  capture_t *capture;
  stream_t *stream;
  unsigned index;
  uint64_t last; /* number of the newest point */
  void *node;    /* and its node */
  void *learned; /* the node up to which the frontier is known */
  unsigned seen; /* branches of the capture when it was learned */
  _Atomic uint64_t vector_clock[BRANCHES];
  branch_t *next;
};

/* The branch, made if need be, with a reference for the caller. NULL: no host
 * memory. */
branch_t *capture_branch(core_t *core, stream_t *stream, uint64_t capture);
void branch_keep(branch_t *branch);
void branch_drop(branch_t *branch);

/* Where the presented stream is in its capture now. The point takes its own
 * reference. False: the stream is not in the capture, or the driver will not
 * say. No lock is held. */
bool branch_point(branch_t *branch, void *handle, capture_point_t *point);
void capture_point_drop(capture_point_t *point);

/* Finds out what the branch's future nodes come after by now. */
void branch_learn(branch_t *branch, void *handle);

/* Makes the branch's future nodes depend on the point. False: refused. */
bool branch_gate(branch_t *branch, void *handle, const capture_point_t *point);

/* Whether the branch's future nodes come after the point. */
bool branch_is_after(const branch_t *branch, const capture_point_t *point);

/* The point of the calling thread's free of a block of the capture, in which
 * the block's user is, or was. */
typedef enum captured_free {
  FREED_INSIDE,  /* the point is stored */
  FREED_UNKNOWN, /* nobody can say where the user is: it alone knows its order */
  FREED_OUTSIDE, /* the capture is over, or its user left it */
} captured_free_t;
captured_free_t capture_point_of_free(core_t *core, uint64_t capture, stream_t *stream,
                                      capture_point_t *point);

bool capture_is_valid(core_t *core);

#endif
