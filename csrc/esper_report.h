/* esper_report.h: what the allocator reports: statistics, counters, gates, failures, snapshots
 * and traces, as plain data. esper_alloc.h includes it, and has the functions that fill it in. */
#ifndef ESPER_REPORT_H
#define ESPER_REPORT_H

#include <stddef.h>
#include <stdint.h>

typedef struct esper_stat {
  int64_t current, peak, allocated, freed;
} esper_stat;

enum { ESPER_ALL, ESPER_SMALL, ESPER_LARGE, ESPER_CLASSES };

/* What torch.cuda.memory_stats() reports. `allocated*` fall at the free,
 * `active*` and `requested*` when the block owes nothing any more. */
typedef struct esper_stats {
  esper_stat allocation[ESPER_CLASSES];
  esper_stat segment[ESPER_CLASSES];
  esper_stat active[ESPER_CLASSES];
  esper_stat inactive_split[ESPER_CLASSES];
  esper_stat allocated_bytes[ESPER_CLASSES];
  esper_stat reserved_bytes[ESPER_CLASSES];
  esper_stat active_bytes[ESPER_CLASSES];
  esper_stat inactive_split_bytes[ESPER_CLASSES];
  esper_stat requested_bytes[ESPER_CLASSES];
  esper_stat oversize_allocations;
  esper_stat oversize_segments;
  int64_t num_alloc_retries;
  int64_t num_ooms;
  int64_t num_oom_rejections; /* by rejection_share */
  int64_t num_sync_all_streams;
  int64_t num_device_alloc;
  int64_t num_device_free;
  int64_t max_split_size; /* -1: unlimited */
} esper_stats;

/* What a private pool has reserved. */
typedef struct esper_pool_stats {
  uint64_t id[2];
  esper_stat reserved_bytes[ESPER_CLASSES];
} esper_pool_stats;

/* Figures of our own, per device. */
typedef struct esper_counters {
  uint64_t gates_issued;   /* waits put on streams for the sake of reuse */
  uint64_t gates_skipped;  /* waits the frontier made unnecessary */
  uint64_t loans;          /* blocks handed out on another stream than home */
  uint64_t uses_pending;   /* uses attached to live or free blocks */
  uint64_t bytes_pending;  /* free bytes that still owe something */
  uint64_t blocks_held;    /* free blocks with a use no event stands for */
  uint64_t events_alive;   /* events that exist, in use or pooled */
  uint64_t events_created; /* since the core was made */
  uint64_t metadata_bytes; /* host memory of blocks, uses, records, addresses */
  uint64_t captured_uses;  /* marks in captures, of memory from outside them */
  uint64_t captured_frees; /* frees of memory so marked: replays may read it */
  uint64_t bytes_orphaned; /* pages that the driver would neither map nor take
                              back, in no segment; they are tried again        */
  uint64_t pages_moved;    /* from where they were free to where a heap grew */
} esper_counters;

/* A gate: a stream that was made to wait for another's work, because it got
 * memory that this work may still touch. */
typedef struct esper_gate_entry {
  int device;
  void *waiting; /* handle of the stream that was made to wait */
  int stream_device;
  void *stream;      /* handle of the stream whose work it waits for; NULL: the
                        legacy stream, or all of the device's                  */
  uint64_t number;   /* of that stream's event */
  size_t size;       /* bytes of the block */
  int64_t issued_us; /* since 1970 */
} esper_gate_entry;

/* The figures of the calling thread's last ESPER_OUT_OF_MEMORY or
 * ESPER_REJECTED. */
typedef struct esper_failure {
  int device;
  size_t requested;   /* bytes asked for */
  size_t size;        /* as they would have been handed out, rounded up */
  size_t device_free; /* as the driver says */
  size_t device_total;
  size_t limit;         /* bytes the memory fraction allows; SIZE_MAX: all */
  size_t allocated;     /* live bytes */
  size_t private_pools; /* of the reserved bytes: in pools but the default */
  size_t reserved;
  size_t segment; /* bytes that the device was to be asked for */
} esper_failure;

/* ------------------------------------------------------------------------
 * Snapshot and trace
 * ---------------------------------------------------------------------- */

typedef enum esper_block_state {
  ESPER_BLOCK_ALLOCATED,    /* live */
  ESPER_BLOCK_PENDING_FREE, /* freed, still owes uses */
  ESPER_BLOCK_INACTIVE      /* free */
} esper_block_state;

/* What kind of use it is: none of these for a plain mark. */
enum {
  ESPER_ENTRY_NO_GATE = 1u, /* no stream is ever made to wait for it */
  ESPER_ENTRY_AT_FREE = 2u, /* by record_stream: ends with the free */
  ESPER_ENTRY_HELD = 4u,    /* no event stands for it: held until the device
                               was synchronised                                */
  ESPER_ENTRY_CAPTURED = 8u /* a place in a capture's graph stands for it: ends
                               for who comes after that there                  */
};

/* A use that is not known to be over. */
typedef struct esper_use_entry {
  int device;      /* of the stream */
  void *stream;    /* handle; NULL: the legacy stream, or all of the device's */
  uint64_t number; /* of the stream's event that ends it; 0: none yet */
  unsigned kind;   /* ESPER_ENTRY_... */
} esper_use_entry;

typedef struct esper_block_entry {
  uintptr_t address;
  size_t size, requested;
  esper_block_state state;
  void *stream;
  unsigned uses;    /* those that are not known to be over */
  size_t first_use; /* into the snapshot's uses */
} esper_block_entry;

typedef struct esper_segment_entry {
  uintptr_t address;
  size_t size;
  int device;
  int large;  /* size class */
  int mapped; /* pages mapped into a reserved range */
  void *stream;
  uint64_t pool[2];
  uint64_t birth; /* orders a device's segments; the stretches of a mapped one share it */
  size_t first_block, block_count; /* into blocks */
} esper_segment_entry;

typedef struct esper_snapshot {
  size_t segment_count, block_count, use_count;
  esper_segment_entry *segments; /* by address */
  esper_block_entry *blocks;     /* by address within each segment */
  esper_use_entry *uses;         /* of each block together */
} esper_snapshot;

typedef enum esper_action {
  ESPER_TRACE_ALLOC,
  ESPER_TRACE_FREE_REQUESTED,
  ESPER_TRACE_FREE_COMPLETED,
  ESPER_TRACE_SEGMENT_ALLOC,
  ESPER_TRACE_SEGMENT_FREE,
  ESPER_TRACE_SEGMENT_MAP,
  ESPER_TRACE_SEGMENT_UNMAP,
  ESPER_TRACE_SNAPSHOT,
  ESPER_TRACE_OOM /* address: bytes free on the device */
} esper_action;

typedef struct esper_trace_entry {
  esper_action action;
  int device;
  uintptr_t address;
  size_t size; /* alloc and free: as asked for */
  void *stream;
  uint64_t pool[2];
  int64_t time_us; /* since 1970 */
} esper_trace_entry;

#endif
