/* esper_report.h: what the allocator reports, as plain data: statistics, counters, failures,
 * snapshots and traces. esper_alloc.h includes this file and has the functions that fill in these
 * structures. */
#ifndef ESPER_REPORT_H
#define ESPER_REPORT_H

#include <stddef.h>
#include <stdint.h>

typedef struct esper_stat {
  int64_t current, peak, allocated, freed;
} esper_stat;

enum { ESPER_ALL, ESPER_SMALL, ESPER_LARGE, ESPER_CLASSES };

/* What torch.cuda.memory_stats() reports. `allocated*` figures fall at the free, `active*` and
 * `requested*` figures when the block owes nothing any more. */
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

/* The memory that a private pool has reserved. */
typedef struct esper_pool_stats {
  uint64_t id[2];
  esper_stat reserved_bytes[ESPER_CLASSES];
} esper_pool_stats;

/* Further figures of a device, which PyTorch does not have. */
typedef struct esper_counters {
  uint64_t held_back;         /* how often the host was held back before memory grew */
  uint64_t held_back_us;      /* how long in all */
  uint64_t held_back_in_vain; /* how often the host gave up: host_wait.h */
  uint64_t allowance;     /* bytes that may be pending, as raised; 0: the host is never held back */
  uint64_t loans;         /* blocks handed out on a stream other than their home */
  uint64_t uses_pending;  /* uses attached to live or free blocks */
  uint64_t bytes_pending; /* free bytes that still owe uses */
  uint64_t blocks_held;   /* free blocks with a use that has no event */
  uint64_t events_alive;  /* existing events, in use or kept for reuse */
  uint64_t events_created;    /* since the core was made */
  uint64_t metadata_bytes;    /* host memory for blocks, uses, records, addresses */
  uint64_t captured_uses;     /* marks in captures, of memory from outside */
  uint64_t captured_frees;    /* frees of memory marked in a capture: replays may still read it */
  uint64_t pages_moved;       /* pages moved from free memory to where a heap grew */
  uint64_t marks_exact;       /* marked uses that end at the mark, on the block's device */
  uint64_t marks_until_free;  /* marked uses that last until the free */
  uint64_t bytes_asleep;      /* of device memory that waking needs: esper_sleep.h */
  uint64_t bytes_asleep_peak; /* since peaks were reset */
} esper_counters;

/* Figures about the calling thread's last ESPER_OUT_OF_MEMORY or ESPER_REJECTED. */
typedef struct esper_failure {
  int device;
  size_t requested;   /* bytes requested */
  size_t size;        /* the same, rounded up */
  size_t device_free; /* according to the driver */
  size_t device_total;
  size_t limit;         /* what the memory fraction allows; SIZE_MAX: no limit */
  size_t allocated;     /* live bytes */
  size_t private_pools; /* reserved bytes of private pools */
  size_t reserved;
  size_t segment;           /* bytes wanted from the device */
  size_t addresses_missing; /* for a fence, because of live memory; 0: memory is missing */
} esper_failure;

/* ------------------------------------------------------------------------
 * Snapshot and trace
 * ---------------------------------------------------------------------- */

typedef enum esper_block_state {
  ESPER_BLOCK_ALLOCATED,    /* live */
  ESPER_BLOCK_PENDING_FREE, /* freed; uses of it, loans aside, have not ended */
  ESPER_BLOCK_INACTIVE      /* free */
} esper_block_state;

/* The kind of a use; 0 for a plain mark. */
enum {
  ESPER_ENTRY_AT_FREE = 1u, /* ends with the free */
  ESPER_ENTRY_HELD = 2u,    /* has no event: held until its stream is seen again, or its device has
                                been synchronised */
  ESPER_ENTRY_CAPTURED = 4u /* ends at a point in a captured graph, for whatever comes after that
                               point */
};

/* A use that is not known to be over. */
typedef struct esper_use_entry {
  int device;      /* of the stream */
  void *stream;    /* handle; NULL: the legacy stream, or all streams of the device */
  uint64_t number; /* number of the stream's event that ends it; held: the first number that an
                      event which ends it may have; 0: none */
  unsigned kind;   /* ESPER_ENTRY_... */
} esper_use_entry;

typedef struct esper_block_entry {
  uintptr_t address;
  size_t size, requested;
  esper_block_state state;
  void *stream;
  unsigned uses;    /* number of uses not known to be over */
  size_t first_use; /* index into the snapshot's uses */
} esper_block_entry;

typedef struct esper_segment_entry {
  uintptr_t address;
  size_t size;
  int device;
  int large;  /* size class */
  int mapped; /* pages in reserved addresses */
  void *stream;
  uint64_t pool[2];
  uint64_t birth;  /* orders a device's segments; entries of one mapped segment share it */
  size_t asleep;   /* bytes without device memory, because they sleep: esper_sleep.h */
  const char *tag; /* "": none. Lives as long as the process */
  size_t first_block, block_count; /* indices into blocks */
} esper_segment_entry;

typedef struct esper_snapshot {
  size_t segment_count, block_count, use_count;
  esper_segment_entry *segments; /* by address */
  esper_block_entry *blocks;     /* grouped by segment, by address */
  esper_use_entry *uses;         /* grouped by block */
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
  ESPER_TRACE_OOM, /* `address` holds the device's free bytes */
  /* Only the recorder is told of these. */
  ESPER_TRACE_PENDING,   /* a freed block waits for marked uses */
  ESPER_TRACE_AVAILABLE, /* it no longer does */
  ESPER_TRACE_HELD_BACK  /* the host was, for `address` microseconds, by a request of `size` */
} esper_action;

typedef struct esper_trace_entry {
  esper_action action;
  int device;
  uintptr_t address;
  size_t size; /* of ALLOC and FREE_...: as requested */
  void *stream;
  uint64_t pool[2];
  int64_t time_us; /* since 1970 */
} esper_trace_entry;

#endif
