/* record.h: the records of a stream's events: those outstanding, by number, and
 * those out of use, kept for the next time. For stream.c, record.c and retire.c;
 * everybody else finds in stream.h what they need. All of it under the stream's
 * record lock, record_keep and record_drop apart. */
#ifndef ESPER_RECORD_H
#define ESPER_RECORD_H

#include "stream.h"

/* Immutable once made, but for the event, which is free for another record
 * when this one has completed. */
struct record {
  stream_t *stream;
  uint64_t number;
  int64_t time_us;       /* the host's clock; 0: nobody needs it */
  void *event;           /* NULL once completed */
  atomic_int references; /* uses, and the stream's probe */
  atomic_int pins;       /* gates being issued on the event just now */
  bool outstanding;      /* in the stream's list */
  bool captured;         /* its event: later ones have to stand for it */
  record_t *older, *newer;
  record_t *next_dropped; /* or the next spare one */
};

/* As many outstanding records need no question whether some have completed. */
enum { ASK_AT = 64 };

/* The stream's bit in its group. */
static inline uint64_t group_bit(const stream_t *s)
{
  return 1ull << s->index % GROUP_STREAMS;
}

/* Positions in the queues of streams that nobody has asked about yet: collected under the
 * device's lock, asked without it. */
enum { PROBES = 16 };
typedef struct probes {
  stream_t *stream[PROBES];
  uint64_t stamp[PROBES];
  int count;
} probes_t;

/* Asks for a position; of several on one stream for the latest. Those of more than PROBES
 * streams are not asked. */
void probes_add(probes_t *probes, stream_t *stream, uint64_t stamp);
/* Records an event on each stream, and finds out what has completed. */
void probes_ask(const probes_t *probes, core_t *core);

/* Asks the driver. */
bool record_is_done(record_t *record);
/* Every number up to this one has completed. */
void records_complete(stream_t *stream, uint64_t number);
/* Records that nobody refers to become spare ones. */
void records_pool_dropped(stream_t *stream);

#endif
