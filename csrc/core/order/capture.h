/* capture.h: which work is ordered after which inside a capture.
 *
 * A capture is a graph in the making. A stream inside one is a *branch*. A branch numbers its
 * *points*. A point is a node: all that the stream had recorded when the core looked is that node
 * or comes before it. A branch's vector clock has, for each other branch, the highest point that
 * its future nodes come after. The clock rises when a walk back from its last node meets one. A
 * point that the walk does not reach is not known to come before, which only keeps memory longer.
 *
 * Inside a capture a use (use.h) has a point in place of a record. Points mean nothing outside
 * their capture.
 *
 * A capture lives as long as a use or heap refers to it. A branch's numbers are under its stream's
 * record lock. */
#ifndef ESPER_CAPTURE_H
#define ESPER_CAPTURE_H

#include "stream.h"

/* A point in a capture: what the branch's stream had recorded by then. */
typedef struct capture_point {
  branch_t *branch; /* NULL: no point. A reference */
  uint64_t number;  /* counted by the branch; 0: before all its nodes */
} capture_point_t;

enum { BRANCHES = 32 }; /* branches from this index on are in no vector clock */

struct branch {
  capture_t *capture;
  stream_t *stream;
  unsigned index;
  uint64_t last; /* number of the newest point */
  void *node;    /* the node of that point */
  void *learned; /* the node that the last walk back from a single node began at, or NULL */
  unsigned seen; /* how many branches the capture had at that walk */
  _Atomic uint64_t vector_clock[BRANCHES];
  branch_t *next;
};

/* Finds or makes the branch, with a reference for the caller. NULL: no host memory. */
branch_t *capture_branch(core_t *core, stream_t *stream, uint64_t capture);
void branch_keep(branch_t *branch);
void branch_drop(branch_t *branch);

/* The branch's point as of now; it takes a reference of its own. If the stream has waited for
 * others and recorded nothing since, that is its next node. False: the stream is not in the
 * capture, or the driver does not say. The caller holds no lock. */
bool branch_point(branch_t *branch, void *handle, capture_point_t *point);
void capture_point_drop(capture_point_t *point);

/* Brings the branch's vector clock up to date. */
void branch_learn(branch_t *branch, void *handle);

/* Whether the branch's future nodes come after the point. */
bool branch_is_after(const branch_t *branch, const capture_point_t *point);

/* Where the calling thread frees a block. `capture` is the one that the block was handed out in;
 * `stream` is the block's user. */
typedef enum captured_free {
  FREED_INSIDE,
  FREED_UNKNOWN, /* the user is mortal, so it cannot be asked: the block gets the user's stamp */
  FREED_OUTSIDE, /* the block waits for a quiesce: the capture is over, the user has left it or may
                    have, or this thread may be filling another graph */
} captured_free_t;
captured_free_t capture_of_free(core_t *core, uint64_t capture, stream_t *stream);

bool capture_is_valid(core_t *core);

#endif
