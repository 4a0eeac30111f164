/* record.h: recording events on a stream, and the records: the outstanding ones, by number, and
 * those out of use. Under the stream's record lock. */
#ifndef ESPER_RECORD_H
#define ESPER_RECORD_H

#include "stream.h"

/* A record's number never changes. Its event may serve another record once this one has
 * completed. */
struct record {
  stream_t *stream;
  uint64_t number;
  void *event;           /* NULL once completed */
  atomic_int references; /* by uses, by the stream's probe */
  atomic_int pins;       /* calls that are using the event just now */
  bool outstanding;      /* in the stream's list */
  bool captured;         /* its event was captured and says nothing: later ones stand for it */
  record_t *older, *newer;
  record_t *next_dropped; /* the next dropped record, or the next spare one */
};

/* ---- recording --------------------------------------------------------- */

/* Records an event on the stream now. The caller gets a reference. NULL: it failed, or the stream
 * is being captured. */
record_t *stream_record(presented_t presented);
/* As stream_record, but keeps the record lock until stream_record_end. NULL: no lock is held, and
 * presented->capture says whether the stream is being captured. */
record_t *stream_record_begin(presented_t *presented);
/* Unlocks the stream. `replaced` (may be NULL) is a record of the stream whose last reference the
 * caller gave up; it becomes a spare one at once. */
void stream_record_end(stream_t *stream, record_t *replaced);
/* As stream_record, for a stream that was not presented to this call. NULL also for a mortal
 * one. */
record_t *stream_record_unpresented(stream_t *stream);
/* Makes one of the core's own streams wait for a foreign event, then records on it. */
record_t *stream_record_event(stream_t *carrier, void *event, int device);

/* A record of the stream numbered `stamp` or higher, so that others can wait for its owner order;
 * recorded now if there is none. The caller gets a reference. NULL: it failed. */
record_t *stream_probe(stream_t *stream, uint64_t stamp);

/* ---- references -------------------------------------------------------- */

void record_keep(record_t *record);
void record_drop(record_t *record);
/* Gives up the caller's reference. True: it was the last, and the caller, who holds the stream's
 * record lock, must pass the record to stream_record_end. */
bool record_release(record_t *record);

/* ---- for retire.c ------------------------------------------------------ */

/* A mark asks whether some have completed once this many more records are outstanding. */
enum { ASK_AT = 64 };

/* The stream's bit in its group. */
static inline uint64_t group_bit(const stream_t *s)
{
  return 1ull << s->index % GROUP_STREAMS;
}

/* Asks the driver whether the record's event has completed. */
bool record_is_done(record_t *record);
/* Notes that every number up to this one has completed. */
void records_complete(stream_t *stream, uint64_t number);
/* Makes dropped records spare ones. */
void records_reclaim(stream_t *stream);

bool stream_is_valid(stream_t *stream);

#endif
