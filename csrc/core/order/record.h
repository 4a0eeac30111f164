/* record.h: the records of a stream's events: those outstanding, by number, and
 * those out of use, kept for the next time. For stream.c, record.c and retire.c;
 * everybody else finds in stream.h what they need. All of it under the stream's
 * record lock, record_keep and record_drop apart. */
#ifndef ESPER_RECORD_H
#define ESPER_RECORD_H

#include "stream.h"

/* As many outstanding records need no question whether some have completed. */
enum { ASK_AT = 64 };

/* The stream's bit in its group. */
static inline uint64_t group_bit(const stream_t *s)
{
  return 1ull << s->index % GROUP_STREAMS;
}

/* Asks the driver. */
bool record_is_done(record_t *record);
/* Every number up to this one has completed. */
void records_complete(stream_t *stream, uint64_t number);
/* Records that nobody refers to become spare ones. */
void records_pool_dropped(stream_t *stream);

#endif
