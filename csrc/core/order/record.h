/* record.h: the records of a stream: the outstanding ones, by number, and those out of use. Under
 * the stream's record lock. Most callers need no more than stream.h offers. */
#ifndef ESPER_RECORD_H
#define ESPER_RECORD_H

#include "stream.h"

/* A record's number never changes. Its event may serve another record once this one has
 * completed. */
struct record {
  stream_t *stream;
  uint64_t number;
  int64_t time_us;       /* by the host's clock; 0: not taken */
  void *event;           /* NULL once completed */
  atomic_int references; /* by uses, the stream's probe, the wait log */
  atomic_int pins;       /* calls that are using the event just now */
  bool outstanding;      /* in the stream's list */
  bool captured;         /* its event was captured and says nothing: later ones stand for it */
  record_t *older, *newer;
  record_t *next_dropped; /* the next dropped record, or the next spare one */
};

/* A mark asks whether some have completed once this many more records are outstanding. */
enum { ASK_AT = 64 };

/* The stream's bit in its group. */
static inline uint64_t group_bit(const stream_t *s)
{
  return 1ull << s->index % GROUP_STREAMS;
}

/* Positions in the queues of streams that nobody has asked about yet: collected under the device's
 * lock, asked without it. */
enum { PROBES = 16 };
typedef struct probes {
  stream_t *stream[PROBES];
  uint64_t stamp[PROBES];
  int count;
} probes_t;

/* Asks for a position; of several on one stream for the latest. Those of more than PROBES streams
 * are not asked. */
void probes_add(probes_t *probes, stream_t *stream, uint64_t stamp);
/* Records an event on each stream, and finds out what has completed. */
void probes_ask(const probes_t *probes, core_t *core);

/* Asks the driver whether the record's event has completed. */
bool record_is_done(record_t *record);
/* Notes that every number up to this one has completed. */
void records_complete(stream_t *stream, uint64_t number);
/* Dropped records become spare ones. */
void records_pool_dropped(stream_t *stream);

#endif
