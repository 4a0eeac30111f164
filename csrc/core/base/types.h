/* types.h: the nouns of the core, and how they refer to each other.
 *
 *   core      devices, streams, the address map
 *   device    one GPU: pools, segments, statistics, trace, one lock
 *   pool      heaps whose memory is kept apart
 *   heap      the free blocks of one (pool, stream, capture, tag), in bins by size
 *   block cache  a few of them, which malloc and free reach without the device's lock
 *   statistics shard  what a heap has counted and not yet added to the statistics
 *   segment   an address range from the driver, with one home heap: classic (one allocation)
 *             or mapped (pages where they are needed)
 *   page      physical memory of the driver, mapped into a segment
 *   block     a piece of a segment, live or free
 *   hole      a piece of a mapped segment without pages; blocks and holes tile their segment
 *   stream    an in-order queue, known by the driver's id
 *   record    an event recorded on a stream, with the stream's next number
 *   use       "that stream may touch the block until this record"
 *
 * A free block may still owe *obligations*: its uses, and its owner order. Owner order is the work
 * that the device had been given before the free; events for all its streams numbered `stamp` or
 * higher come after it. The home stream need not wait for it.
 *
 * lock_order.h has the order of locks. The record lock is held over event_record and stream_wait,
 * and over their counterparts in a capture, because numbers must follow the driver's order (rule
 * 1). */
#ifndef ESPER_TYPES_H
#define ESPER_TYPES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../device/device.h"
#include "../../esper_alloc.h"

typedef struct esper_core core_t;
typedef struct esper_pool pool_t;
typedef struct device device_t;
typedef struct heap heap_t;
typedef struct segment segment_t;
typedef struct page page_t;
typedef struct shared shared_t;
typedef struct import import_t;
typedef struct block block_t;
typedef struct stream stream_t;
typedef struct record record_t;
typedef struct use use_t;
typedef struct route route_t;
typedef struct capture capture_t;
typedef struct branch branch_t;

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* Data that different threads write is kept on different lines. */
#define CACHE_LINE 64
#define ON_ITS_OWN_LINE _Alignas(CACHE_LINE)

enum { BLOCK_ALIGN = 512 }; /* every size is a multiple, every address aligned */

#endif
