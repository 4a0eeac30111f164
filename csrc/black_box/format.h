/* format.h: the file of a black box, and what follow.h writes.
 *
 * A file is a header and sections, which begin at multiples of 8 bytes. Numbers are little-endian.
 * Events are words of 64 bits in chunks; a chunk is of one thread. The first word of an event is
 *
 *   kind : 4 | ticks : 20 | address / 512 : 40
 *
 * where the ticks are counted from the chunk's last TIME word, or else from its beginning.
 * ALLOC and most of the others have a second word,
 *
 *   size : 36 | lane : 10 | site : 18
 *
 * where a size of 2^35 and more is in units of 512 bytes, with the upper bit set. */
#ifndef ESPER_BLACK_BOX_FORMAT_H
#define ESPER_BLACK_BOX_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#define BOX_MAGIC UINT64_C(0x31584f4252505345) /* "ESPRBOX1" */
enum { BOX_VERSION = 1 };

/* A word with neither ticks nor an address: kind : 4 | ticks since the clock began : 60 */
enum {
  BOX_NONE,
  BOX_ALLOC,     /* size, lane of the stream, site */
  BOX_FREE,      /* one word */
  BOX_PENDING,   /* one word: freed, and waits for marked uses */
  BOX_AVAILABLE, /* one word: it no longer does */
  BOX_USE,       /* size 0, lane of the marked stream, site */
  BOX_SEGMENT_ALLOC,
  BOX_SEGMENT_FREE,
  BOX_SEGMENT_MAP,
  BOX_SEGMENT_UNMAP, /* size, lane of stream and pool */
  BOX_OOM,           /* address: free bytes of the device, rounded down; size asked for */
  BOX_HELD_BACK,     /* address: microseconds x 512; size asked for */
  BOX_TIME,
  BOX_KINDS
};

enum {
  TICK_SHIFT = 7, /* a tick is so many cycles of the clock, as a power of two */
  TICK_BITS = 20,
  ADDRESS_BITS = 40,
  ADDRESS_SHIFT = 9,
  SIZE_BITS = 35,
  LANE_BITS = 10,
  SITE_BITS = 18,
  MOST_LANES = 1 << LANE_BITS,
  MOST_SITES = 1 << SITE_BITS,
};

static inline int box_words(unsigned kind)
{
  return kind == BOX_FREE || kind == BOX_PENDING || kind == BOX_AVAILABLE || kind == BOX_TIME ? 1
                                                                                              : 2;
}

static inline uint64_t box_first(unsigned kind, uint64_t ticks, uint64_t address)
{
  return kind | ticks << 4 | (address >> ADDRESS_SHIFT) << (4 + TICK_BITS);
}

static inline unsigned box_kind(uint64_t first)
{
  return first & 15;
}

static inline uint64_t box_ticks(uint64_t first)
{
  return first >> 4 & ((1u << TICK_BITS) - 1);
}

static inline uint64_t box_address(uint64_t first)
{
  return first >> (4 + TICK_BITS) << ADDRESS_SHIFT;
}

static inline uint64_t box_second(uint64_t size, unsigned lane, unsigned site)
{
  const uint64_t unit = UINT64_C(1) << SIZE_BITS;
  uint64_t coded = size < unit ? size : unit | ((size + 511) >> ADDRESS_SHIFT & (unit - 1));
  return coded | (uint64_t)lane << (SIZE_BITS + 1) | (uint64_t)site << (SIZE_BITS + 1 + LANE_BITS);
}

static inline uint64_t box_size(uint64_t second)
{
  const uint64_t unit = UINT64_C(1) << SIZE_BITS, low = second & (unit - 1);
  return second & unit ? low << ADDRESS_SHIFT : low;
}

static inline unsigned box_lane(uint64_t second)
{
  return second >> (SIZE_BITS + 1) & (MOST_LANES - 1);
}

static inline unsigned box_site(uint64_t second)
{
  return (unsigned)(second >> (SIZE_BITS + 1 + LANE_BITS));
}

typedef struct box_header {
  uint64_t magic;
  uint32_t version, size;         /* of this header, bytes */
  uint64_t begin_ticks, begin_ns; /* two readings of the clock, and nanoseconds since 1970 */
  uint64_t end_ticks, end_ns;
  uint64_t complete_ticks; /* from here on no event was overwritten */
  uint64_t lost;           /* events that could not be recorded */
  uint64_t pid;
  char why[64]; /* why it was written, NUL-terminated */
} box_header_t;

/* Sections, each after one of these. A reader skips those that it does not know. */
typedef struct box_section {
  char name[4];
  uint32_t count; /* of its items */
  uint64_t bytes; /* that follow */
} box_section_t;

/* "LANE": numbered from 0, which is every lane beyond the most. */
typedef struct box_lane_item {
  int32_t device;
  uint32_t unused;
  uint64_t stream;
  uint64_t pool[2];
  int64_t before; /* bytes of segments when the events begin */
} box_lane_item_t;

/* "SITE": from number 1 on, each a length (uint32) and as many bytes of UTF-8, with a line for each
 * frame, the innermost first. */

/* "LIVE": the last event at an address, of those that are gone; `size` 0: it was a free. */
typedef struct box_live_item {
  uint64_t address, size, ticks;
  uint32_t lane, site;
} box_live_item_t;

/* "EVNT": one chunk: this and so many words. */
typedef struct box_chunk_head {
  uint64_t ticks; /* at its beginning */
  uint32_t thread, words;
} box_chunk_head_t;

/* "SEGM": the segments when it was written. */
typedef struct box_segment_item {
  uint64_t address, size;
  int32_t device;
  uint32_t flags; /* 1: mapped, 2: of large blocks */
  uint64_t stream, pool[2];
} box_segment_item_t;

/* "BLCK": blocks that are in use then, or pending. */
typedef struct box_block_item {
  uint64_t address, size, requested, stream;
  uint32_t pending, unused;
} box_block_item_t;

/* "INFO": a JSON object in UTF-8. "END ": nothing follows. */

#endif
