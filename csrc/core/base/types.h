/* types.h: the nouns of the core, and how they refer to each other.
 *
 *   core      devices, streams, the address map
 *   device    one GPU: pools, segments, statistics, trace, one lock
 *   pool      heaps whose memory serves nobody else
 *   heap      the free blocks of (pool, stream, capture), in bins by size
 *   block cache  the few of them that malloc and free reach without the device's lock
 *   statistics shard  what a heap's blocks have yet to add to the statistics
 *   segment   an address range from the driver; has one home heap. A classic
 *             one is one allocation; a mapped one has pages where it needs them
 *   page      memory of the driver's, mapped into a segment
 *   block     a piece of a segment: live or free; tiles it with its neighbours
 *   hole      a piece of a mapped segment where no page is; tiles it, too
 *   stream    an in-order queue, known by the driver's id
 *   record    an event recorded on a stream, with the stream's next number
 *   use       "that stream may touch the block until this record"
 *
 * What a free block still owes are its obligations: its uses, and its owner
 * order: the work its home stream had enqueued before the free, which events
 * of that stream numbered `stamp` or higher stand for.
 *
 * lock_order.h has the order of locks. The record lock is held over event_record and
 * stream_wait, and over their counterparts inside a capture, because numbers must follow the
 * driver's order (rule 1). */
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
typedef struct orphan orphan_t;
typedef struct shared shared_t;
typedef struct import import_t;
typedef struct block block_t;
typedef struct stream stream_t;
typedef struct record record_t;
typedef struct use use_t;
typedef struct route route_t;
typedef struct pool_stats pool_stats_t;
typedef struct capture capture_t;
typedef struct branch branch_t;

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* What different threads write is kept so far apart. */
#define CACHE_LINE 64
#define ON_ITS_OWN_LINE _Alignas(CACHE_LINE)

enum { BLOCK_ALIGN = 512 }; /* every size is a multiple, every address aligned */

/* ---- asserts ----------------------------------------------------------- */

/* Our own mistakes; the caller's are answered with ESPER_INVALID. */
void core_assert_failed(const char *what, const char *file, int line);
#ifdef NDEBUG
#define core_assert(x) ((void)sizeof(x))
#else
#define core_assert(x) ((x) ? (void)0 : core_assert_failed(#x, __FILE__, __LINE__))
#endif

#endif
