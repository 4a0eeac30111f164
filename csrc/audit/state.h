/* state.h: the structures of an engine. */
#ifndef ESPER_AUDIT_STATE_H
#define ESPER_AUDIT_STATE_H

#include <stdlib.h>
#include <string.h>

#include "audit.h"
#include "clock.h"
#include "table.h"

/* A freed block whose memory its stream may get while another stream still uses it. It becomes a
 * finding when somebody touches memory allocated after the free without being ordered after the
 * use, and nothing once the stream is ordered. Frees at one line between two allocations of the
 * stream are one hazard: whatever follows one of them follows all. */
typedef struct hazard {
  struct hazard *next;
  uint32_t slot; /* of the use */
  uint64_t epoch;
  uint64_t freed_at; /* audit.steps */
  audit_finding finding;
} hazard;

/* An in-order queue of work: a stream outside captures, or its branch in one. */
typedef struct lane {
  uint32_t slot;
  uint64_t now;          /* the epoch of what is enqueued next; 0: the lane is not in use */
  clock_vector after;    /* what that comes after */
  clock_copy *copy;      /* of `after`; NULL: it has changed since */
  uint64_t host_version; /* of the host's clock when it was last joined into `after` */
  uint64_t allocated_at; /* audit.steps when the stream was given memory last */
  hazard *hazards;
} lane;

typedef struct block block;

/* An access inside a capture, to be repeated by each replay. */
typedef struct captured_access {
  uintptr_t address;
  uint64_t serial; /* of the block; another one: it is gone */
  audit_footprint bytes;
  audit_place place;
  int writes;
} captured_access;

/* A block that was allocated inside a capture. */
typedef struct owned_block {
  uintptr_t address;
  uint64_t serial;
} owned_block;

typedef struct capture {
  uint64_t id; /* never 0 */
  captured_access *accesses;
  size_t count, capacity;
  owned_block *blocks;
  size_t block_count, block_capacity;
} capture;

typedef struct graph {
  captured_access *accesses;
  owned_block *blocks;
  size_t count, block_count;
  uint64_t generation; /* replays so far */
  audit_point last;    /* replay */
  uint64_t capture;    /* its id */
} graph;

typedef struct stream {
  audit_stream name;
  uint32_t number; /* its place in audit.streams */
  lane outside, branch;
  capture *capture; /* NULL: it is in none */
} stream;

typedef struct event {
  uint32_t slot;
  uint64_t epoch;
  clock_copy *after;
  uint64_t capture; /* its id; 0: recorded outside */
} event;

/* One stream's access to a block. */
typedef struct use {
  uint32_t slot;
  uint32_t stream; /* its number */
  uint64_t epoch;
  audit_footprint bytes;
  audit_place place;
  uint64_t reported; /* bit i: a race with slot i modulo 64 was reported */
  uint8_t writes, is_allocation, is_protected;
} use;

/* The newest view of its kind of a graph's output. */
typedef struct handed_out {
  uint64_t like, generation;
} handed_out;

typedef struct mark {
  uint32_t slot, stream, site;
  int until_free;
} mark;

struct block {
  uintptr_t address;
  size_t size;
  uint64_t serial; /* audit.steps at the allocation */
  uint32_t home;   /* number of its stream; AUDIT_NONE: unknown */
  uint32_t allocated;
  uint64_t capture; /* allocated inside it; 0: outside */
  int is_held;
  use *uses;
  mark *marks;
  handed_out *views;
  size_t use_count, use_capacity, mark_count, mark_capacity, view_count, view_capacity;
};

/* A wait that the program lacks, as if it stood just before the later access of a finding. */
typedef struct assumed_wait {
  size_t finding; /* its index */
  uint32_t slot;  /* of the later access: what comes after it comes after `before` */
  uint64_t epoch;
  clock_vector before;
} assumed_wait;

enum { AUDIT_ASSUMED = 32 }; /* the latest are kept */
#define AUDIT_NO_CAUSE SIZE_MAX

#define AUDIT_NONE UINT32_MAX

struct audit {
  stream **streams;
  size_t stream_count, stream_capacity;
  table stream_names;
  /* Slots of captures that are over are used again, with higher epochs. */
  uint32_t slot_count;
  uint32_t *free_slots;
  uint64_t *free_epochs;
  size_t free_count, free_slots_capacity, free_epochs_capacity;
  clock_vector host;
  uint64_t host_version;
  table events, blocks, graphs;
  table captures; /* active ones, by id */
  table owners;   /* graphs by the id of their capture */
  uint64_t capture_ids;
  uint64_t steps;          /* allocations and frees so far */
  audit_finding last_free; /* see audit_last_free() */
  uint64_t last_free_at;   /* audit.steps then */
  audit_finding *findings;
  size_t finding_count, finding_capacity;
  assumed_wait assumed[AUDIT_ASSUMED];
  uint64_t assumed_count; /* so far; those beyond the array took the oldest one's place */
  table finding_keys;
  table ordered_keys; /* of hazards whose stream was ordered in time */
  size_t bytes;       /* of blocks, their uses and marks, and of hazards */
  int lost;
};

/* Zeroed. NULL: no host memory. */
static inline void *audit_new(size_t size)
{
  void *made = malloc(size);
  return made ? memset(made, 0, size) : NULL;
}

/* Makes room for one more element; returns 0 if there is no host memory. */
static inline int audit_reserve(void **at, size_t *capacity, size_t count, size_t size)
{
  if (count < *capacity)
    return 1;
  const size_t larger = *capacity ? 2 * *capacity : 2;
  void *moved = realloc(*at, larger * size);
  if (!moved)
    return 0;
  *at = moved;
  *capacity = larger;
  return 1;
}

#endif
