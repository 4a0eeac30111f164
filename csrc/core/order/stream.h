/* stream.h: streams, the numbers of their events, and their frontiers.
 *
 * Each event that the core records on a stream takes the stream's next number;
 * a stream's events complete in the order of their numbers. The frontier of
 * stream R for stream S is the highest number of S that R's future work is
 * ordered after: it rises when R is made to wait (gated). */
#ifndef ESPER_STREAM_H
#define ESPER_STREAM_H

#include "../base/rules.h"
#include "device.h"

enum {
  CLOCK_ENTRIES = 256, /* streams with a higher index have no frontier row */
  STREAM_EVENTS = 32,  /* out of use, kept by the stream; more go to the pool */
};

/* Streams by index, so that the few with records to ask about are found among
 * many. */
enum { GROUP_STREAMS = 64 };

typedef struct stream_group {
  _Atomic uint64_t listed; /* bit i: stream[i] has outstanding records, or had */
  stream_t *stream[GROUP_STREAMS];
  struct stream_group *older;
} stream_group_t;

struct stream {
  /* Read by every malloc and seldom written. */
  ON_ITS_OWN_LINE void *handle; /* of a mortal stream: for show only */
  device_t *device;
  stream_t *next_by_handle; /* immortal ones, by handle */
  _Atomic(heap_t *) heap;   /* of the default pool, outside captures; or NULL */
  atomic_bool holds;        /* some free block has a use here, no record */
  atomic_bool kept;         /* a heap is its own, or a use without record was on it */
  atomic_bool immortal;
  bool all_streams;    /* the stand-in for everything that runs on the device */
  atomic_uint traits;  /* ESPER_TRAIT_...; the stand-in has those of any stream */
  _Atomic uint64_t id; /* the driver's; never used again */
  core_t *core;

  ON_ITS_OWN_LINE _Atomic uint64_t last; /* the last number taken: every free reads it */
  unsigned index;                        /* of its row in other streams' frontiers */
  bool listed;                           /* there; under the record lock */
  stream_group_t *group;
  stream_t *next;           /* all streams of the core */
  stream_t *next_in_bucket; /* by id */

  ON_ITS_OWN_LINE mutex_t lock; /* the record lock: all below but the atomics, and `last` */
  _Atomic uint64_t completed;   /* every number up to this one has completed */
  record_t *oldest, *newest;    /* outstanding records, by number */
  unsigned outstanding;         /* how many */
  unsigned ask_at;              /* so many are worth a question */
  _Atomic int64_t oldest_us;    /* the oldest one's time */
  record_t *spare;              /* records out of use */
  void *events[STREAM_EVENTS];  /* events out of use: the last event_count */
  unsigned event_count;
  atomic_bool has_outstanding;
  _Atomic(record_t *) dropped; /* records nobody refers to, to be pooled */
  uint64_t syncing;            /* what a synchronisation will have completed */
  record_t *probe;             /* of the owner order, for other streams' sake */
  _Atomic uint64_t vector_clock[CLOCK_ENTRIES];
};

/* A stream as it was presented, for the length of one call. */
typedef struct presented {
  stream_t *stream;
  void *handle;
  bool asked;       /* the driver was asked already whether it is captured: */
  uint64_t capture; /* its answer */
} presented_t;

/* Finds or makes the stream. */
esper_status stream_present(core_t *core, esper_stream as, presented_t *presented);

/* Finds the stream of a driver's handle above 2, whatever its device. False: it is
 * not known, or is captured. */
bool stream_find(core_t *core, void *handle, presented_t *presented);

static inline _Atomic(stream_t *) *stream_bucket(core_t *core, const void *handle)
{
  return &core->stream_by_handle[(uintptr_t)handle * 0x9e3779b97f4a7c15u >> 56];
}

/* Immortal streams keep their handle, so it may stand for them, however it is
 * presented. Any device: NULL. */
static inline stream_t *stream_with_handle(core_t *core, const device_t *device, const void *handle)
{
  stream_t *s = atomic_load_explicit(stream_bucket(core, handle), memory_order_acquire);
  while (s && (s->handle != handle || (device && s->device != device)))
    s = s->next_by_handle;
  return s;
}

static inline bool stream_is_legacy(const void *handle)
{
  return (uintptr_t)handle <= 1;
}

/* The stream, if it is known to live for ever; NULL otherwise. */
static inline stream_t *stream_immortal(core_t *core, const device_t *device, void *handle)
{
  return stream_is_legacy(handle) ? device->legacy : stream_with_handle(core, device, handle);
}

/* One of those, as it would be presented. */
static inline presented_t stream_presented(stream_t *stream, void *handle)
{
  return (presented_t){.stream = stream, .handle = stream_is_legacy(handle) ? NULL : handle};
}

/* The stream with the driver's id, made if need be. NULL: no host memory. */
stream_t *stream_create(core_t *core, device_t *device, uint64_t id, void *handle);
/* From now on the handle stands for the stream. */
void stream_make_immortal(core_t *core, stream_t *stream, void *handle);
void stream_destroy_all(core_t *core);

#define CAPTURE_UNKNOWN UINT64_MAX /* the driver would not say */

/* Records an event on the stream, now. The caller owns a reference. NULL:
 * it could not be done, or the stream is being captured. */
record_t *stream_record(presented_t presented);
/* As stream_record, but the stream's record lock stays held until stream_record_end:
 * `replaced`, if not NULL, is a record of the stream that only the caller refers
 * to, which then needs no other way back. NULL: no lock is held. */
record_t *stream_record_begin(presented_t presented);
void stream_record_end(stream_t *stream, record_t *replaced);
/* As stream_record, of a stream whose handle is nobody's to present now, so that its
 * own thread may be doing anything with it meanwhile. */
record_t *stream_record_later(stream_t *stream);
/* Makes the stream, one of our own, wait for a foreign event, and records. */
record_t *stream_record_event(stream_t *carrier, void *event, int device);

/* The work of `stream` so far, for the sake of other streams: makes sure an
 * event numbered `stamp` or higher exists, if it can be recorded. */
record_t *stream_probe(stream_t *stream, uint64_t stamp);

typedef enum gate_result {
  GATE_REFUSED, /* by the driver: nothing changed */
  GATE_NEEDLESS,
  GATE_ISSUED
} gate_result;

/* Makes the presented stream's future work wait for the record. */
gate_result stream_gate(presented_t presented, record_t *record);

/* How far the stream is behind the host, as far as its records tell: its oldest
 * outstanding one is so old. Never negative. INT64_MAX: it has no time. */
int64_t stream_lag_us(const stream_t *stream, int64_t now_us);

/* What is true of its work from now on. */
void stream_set_traits(stream_t *stream, unsigned traits);

/* Whether its work may wait for what is not yet enqueued. */
static inline bool stream_is_rendezvous(const stream_t *stream)
{
  return atomic_load_explicit(&stream->traits, memory_order_relaxed) & ESPER_TRAIT_RENDEZVOUS &&
         RULE(RENDEZVOUS_NOT_GATED);
}

/* The host waits for the record. */
esper_status stream_wait_host(record_t *record);

/* Finds out which events have completed. */
void stream_retire(stream_t *stream);
void stream_retire_all(core_t *core);
/* Whether its events up to the number have completed, asking for some microseconds,
 * which even an idle stream takes for an event. */
bool stream_completes_now(stream_t *stream, uint64_t number);

/* Takes a number that stands for all work enqueued so far on the stream, and
 * once the device was synchronised declares it completed. Under the device's
 * sync lock. */
void stream_sync_begin(stream_t *stream);
void stream_sync_done(stream_t *stream);

/* Its records out of use go back to the device. */
void stream_give_spares(stream_t *stream);

void record_keep(record_t *record);
void record_drop(record_t *record);
/* Gives the caller's reference up. True: it was the last, and the caller, who
 * holds the stream's record lock, gives the record to stream_record_end. */
bool record_release(record_t *record);

static inline bool stream_completed(const stream_t *stream, uint64_t number)
{
  return atomic_load(&stream->completed) >= number;
}

/* The stamp of a block that the stream frees now. */
static inline uint64_t stream_stamp(const stream_t *stream)
{
  return atomic_load(&stream->last) + (RULE(STAMP_IS_NEXT) ? 1 : 0);
}

/* Whether future work of `reader` is ordered after number `number`. */
static inline bool stream_is_after(const stream_t *reader, const stream_t *stream, uint64_t number)
{
  return RULE(GATE_IS_REMEMBERED) && stream->index < CLOCK_ENTRIES &&
         atomic_load(&reader->vector_clock[stream->index]) >= number;
}

/* The one whose index it is. */
stream_t *stream_at(core_t *core, unsigned index);

bool stream_is_valid(stream_t *stream);

#endif
