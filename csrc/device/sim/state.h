/* state.h: the structures of a simulation. One lock, sim.lock, guards all of them; functions that
 * take one expect it to be held. */
#ifndef ESPER_SIM_STATE_H
#define ESPER_SIM_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "sim.h"

/* A vector clock: at[i] is the highest operation of slot i that the clock's owner is ordered after;
 * 0 past the end. */
typedef struct sim_clock {
  uint32_t count, capacity;
  uint64_t *at;
} sim_clock;

typedef struct sim_nodes { /* nodes of one graph, by number */
  uint32_t count, capacity;
  uint32_t *at;
} sim_nodes;

typedef enum sim_op_kind {
  SIM_OP_KERNEL,
  SIM_OP_RECORD,
  SIM_OP_WAIT,
  SIM_OP_WAIT_FLAG,
  SIM_OP_RAISE_FLAG,
  SIM_OP_TO_HOST,
  SIM_OP_TO_DEVICE,
  SIM_OP_ZERO,
  SIM_OP_GRAPH
} sim_op_kind;

typedef struct sim_op {
  sim_op_kind kind;
  uint32_t slot;     /* WAIT: slot of the stream waited for */
  uint64_t index;    /* WAIT: operation waited for; flags: the flag */
  uintptr_t address; /* copies; KERNEL, if addresses are host memory */
  void *host;        /* copies */
  size_t size;
  uint64_t owner;
  sim_access access;
  sim_graph *graph;
} sim_op;

/* A stream lives in a slot. The operations of a slot are numbered from 1 through all streams that
 * use it in turn, so (slot, number) always means the same operation. A slot is reused once
 * everybody is ordered after all of its operations. */
typedef struct sim_stream {
  uint32_t slot;
  int device;
  uint64_t id;
  uint32_t handle; /* position in sim.handles; SIM_NONE: none */
  int alive;
  uint64_t enqueued, executed;
  sim_op *ops; /* operation i is at i modulo capacity */
  uint64_t ops_capacity;
  uint32_t pending_at;   /* position in sim.pending; SIM_NONE: none */
  int visiting;          /* sim_run_to is visiting it */
  sim_clock clock;       /* what its future is ordered after */
  uint64_t host_version; /* of sim.host when last joined into clock */
  sim_graph *capture;
  sim_nodes tails; /* in a capture: the nodes its next node depends on */

  /* What the program did, for the check of followers. */
  int of_core;           /* made by the driver's stream_create */
  uint64_t given;        /* the last operation that the program gave it */
  int core_waited;       /* since then the core made it wait */
  sim_clock before_wait; /* if so: its clock before */
  sim_clock by_program;  /* what the program's waits order its future after */
} sim_stream;

typedef struct sim_event {
  int device, alive;
  uint32_t slot;
  uint64_t index; /* 0: never recorded */
  int all;        /* stands for many slots' operations, `until` */
  sim_clock until;
  sim_clock clock;
  uint64_t capture; /* recorded inside this capture */
  sim_nodes nodes;
  int of_core;          /* made by the driver's event_create */
  sim_clock by_program; /* of the program's events; of the core's, empty */
} sim_event;

#define SIM_NONE UINT32_MAX
enum { SIM_FLAGS = 64, SIM_REPORT = 8192, SIM_OWNERS = 1 << 16 };

/* The accesses to one stretch of bytes that may still be running. */
typedef struct sim_marks sim_marks;

/* The stretches of a physical allocation, in order, without gaps. */
typedef struct sim_stretch {
  size_t begin, end;
  sim_marks *marks; /* NULL: none */
  uint64_t owner;
  int live;
  int absent;          /* live, but its contents have not come back to this page */
  uintptr_t copy;      /* host memory that has the same contents; 0: none */
  uint32_t copy_slot;  /* the copy, in either direction: stream's slot */
  uint64_t copy_index; /* and the slot's operation; 0: the bytes were accessed since */
  uint32_t fill_slot;  /* the operation that brought its contents back; index 0: none */
  uint64_t fill_index;
} sim_stretch;

/* Contents of live memory whose page is unmapped. */
typedef struct sim_parked {
  uintptr_t address;
  size_t size;
  uint64_t owner;
  uintptr_t host; /* 0: lost */
} sim_parked;

typedef struct sim_host_block {
  char *memory;
  size_t size;
} sim_host_block;

/* Physical memory: a classic allocation or a page. */
typedef struct sim_physical {
  int device;
  size_t size;
  uint64_t page; /* 0: classic */
  size_t mappings;
  size_t handles;     /* from page_create and page_import, not yet released */
  uint64_t name;      /* for importing; 0: not exported */
  int kept;           /* it cannot be exported */
  size_t file_offset; /* of a page with host memory behind it */
  sim_stretch *stretches;
  size_t stretch_count, stretch_capacity;
} sim_physical;

/* Addresses with physical memory behind them. */
typedef struct sim_span {
  uintptr_t begin, end;
  sim_physical *physical;
  uint64_t access; /* bit i: device i may read and write here */
} sim_span;

typedef struct sim_range { /* reserved addresses */
  uintptr_t begin, end;
  int device;
} sim_range;

typedef struct sim_hole { /* addresses that were given back */
  uintptr_t begin;
  size_t size;
} sim_hole;

typedef struct sim_memory {
  sim_span *spans; /* by address */
  size_t span_count, span_capacity;
  sim_range *ranges; /* by address */
  size_t range_count, range_capacity;
  sim_hole *holes;
  size_t hole_count, hole_capacity;
  sim_physical **pages; /* by the low half of the page's number, minus 1 */
  uint32_t page_count, page_capacity, page_turn;
  uintptr_t next; /* next fake address */
  int file;       /* host memory of pages; -1: not open */
  size_t file_size;
} sim_memory;

typedef struct sim_node {
  sim_op op;
  uint64_t *ancestors; /* bit i: node i, for every lower number i */
  sim_nodes before;    /* its direct dependencies */
} sim_node;

struct sim_graph {
  uint64_t id;
  uint64_t group; /* 0: none */
  int active, invalid;
  uint32_t origin;  /* slot */
  sim_graph *outer; /* of a body; valid while the outer one is active */
  uint32_t outer_node;
  sim_node *nodes;
  uint32_t count, capacity;
  size_t references; /* of the program and of pending launches */
};

typedef struct sim_owner { /* for reports */
  uint64_t id;
  uintptr_t address;
  size_t size;
  int device;
  uint64_t stream; /* id */
  uint64_t capture, group;
} sim_owner;

typedef struct sim_hook {
  sim_hook_fn *run;
  void *context;
} sim_hook;

typedef struct sim_fault {
  uint64_t nth; /* remaining calls until the fault; 0: no fault */
  int sticky;
  esper_status status;
} sim_fault;

typedef struct sim_device {
  uint32_t legacy; /* slot */
  size_t capacity, caches;
  sim_alive alive;
} sim_device;

typedef struct sim_thread_stream {
  uint64_t thread;
  int device;
  uint32_t slot;
} sim_thread_stream;

struct sim {
  esper_driver driver;
  sim_options options;
  pthread_mutex_t lock;
  sim_device *devices;

  /* Streams and events. */
  sim_stream **streams; /* by slot */
  uint32_t stream_count, stream_capacity;
  uint32_t dead_count; /* slots whose stream was destroyed */
  uint32_t *handles;   /* slot; SIM_NONE: free */
  uint32_t handle_count, handle_capacity;
  uint32_t *free_handles;
  uint32_t free_handle_count, free_handle_capacity;
  sim_thread_stream *thread_streams;
  size_t thread_stream_count, thread_stream_capacity;
  uint32_t *pending; /* slots with operations to execute */
  uint32_t pending_count, pending_capacity;
  sim_event **events;
  uint32_t event_count, event_capacity;
  uint32_t *free_events;
  uint32_t free_event_count, free_event_capacity;
  uint64_t next_stream_id, next_capture_id;
  uint64_t random;
  uint32_t pace, pace_left;
  uint64_t flags;

  sim_memory memory;
  int unreachable; /* no device can access another's memory */
  int keeps;       /* new pages cannot be exported */
  uint64_t last_name;

  sim_graph **captures; /* active ones */
  uint32_t capture_count, capture_capacity;
  sim_graph **bodies; /* of active captures */
  uint32_t body_count, body_capacity;

  /* The oracle. */
  sim_clock host;
  uint64_t host_version;
  uint64_t owner_count;
  sim_owner *owners; /* the latest ones, by id modulo SIM_OWNERS */
  sim_marks *free_marks[8];
  sim_parked *parked;
  size_t parked_count, parked_capacity;
  sim_host_block *host_blocks;
  size_t host_block_count, host_block_capacity;
  int may_lose; /* contents of live memory */

  /* Faults, hooks, counts. */
  uint64_t calls[SIM_CALL_COUNT + 1];
  sim_fault faults[SIM_CALL_COUNT + 1];
  uint64_t faults_happened;
  _Atomic(sim_hook *) hooks[SIM_CALL_COUNT][2];
  sim_hook **old_hooks;
  size_t old_hook_count, old_hook_capacity;

  /* Failures. */
  sim_failure_fn *on_failure;
  void *on_failure_context;
  uint64_t failures;
  size_t report_length;
  char report[SIM_REPORT];
};

#endif
