/* read.h: reads a file of a black box, which may come from anywhere. */
#ifndef ESPER_BLACK_BOX_READ_H
#define ESPER_BLACK_BOX_READ_H

#include "format.h"

/* Events by time. An ALLOC is of memory that is not live, and a FREE of memory that is. */
typedef struct box_events {
  size_t count;
  int64_t *ns; /* since 1970 */
  uint64_t *address, *size;
  int64_t
      *partner; /* of an ALLOC its FREE, of others with an address the ALLOC: an index; -1: none */
  uint32_t *site, *thread;
  uint16_t *lane;
  uint8_t *kind;
} box_events_t;

/* Pointers into the file's bytes, but for the events. */
typedef struct box_file {
  box_header_t header;
  const char *info; /* not NUL-terminated */
  size_t info_bytes;
  const box_lane_item_t *lanes;
  const char *sites; /* the section's items */
  const box_segment_item_t *segments;
  const box_block_item_t *blocks;
  size_t lane_count, site_count, site_bytes, segment_count, block_count;
  int64_t complete_ns; /* from here on no event was overwritten */
  box_events_t events;
} box_file_t;

/* Reads the bytes of a file, which must be aligned to 8 and stay. Returns NULL, or why it is
 * refused: half a sentence. */
const char *box_read(const void *data, size_t bytes, box_file_t *file);
/* Frees the events. */
void box_forget(box_file_t *file);

#endif
