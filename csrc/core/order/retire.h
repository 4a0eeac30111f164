/* retire.h: finding out which events have completed: by asking, or because the whole device was
 * synchronised. */
#ifndef ESPER_RETIRE_H
#define ESPER_RETIRE_H

#include "stream.h"

/* Finds out which of the stream's events have completed. */
void stream_retire(stream_t *stream);
void stream_retire_all(core_t *core);
/* Whether the number has completed. Asks for some microseconds, because an idle stream needs some
 * microseconds too until an event has completed. */
bool stream_completes_now(stream_t *stream, uint64_t number);

/* Notes that every number up to this one has completed. */
void stream_declare_completed(stream_t *stream, uint64_t number);

/* Takes a number without recording an event: earlier stamps are at most that number, later ones are
 * higher. */
uint64_t stream_pass(stream_t *stream);

/* Before the device is synchronised: takes a number that stands for all work enqueued so far on the
 * stream. Afterwards: notes that it has completed. Under the device's sync lock. */
void stream_sync_begin(stream_t *stream);
void stream_sync_done(stream_t *stream);

/* Positions in the queues of streams that the driver has still to be asked about. They are
 * collected under the device's lock, and asked about without it. */
enum { PROBES = 16 };
typedef struct probes {
  stream_t *stream[PROBES];
  uint64_t stamp[PROBES];
  int count;
} probes_t;

/* Adds a position. Of several on one stream only the latest counts. Beyond PROBES streams,
 * positions are ignored. */
void probes_add(probes_t *probes, stream_t *stream, uint64_t stamp);
/* Records an event on each stream, and finds out what has completed. `patient`: gives each event
 * the moment that it takes on an idle stream. */
void probes_ask(const probes_t *probes, core_t *core, bool patient);

#endif
