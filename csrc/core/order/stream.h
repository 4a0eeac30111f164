/* stream.h: streams, and the numbers of their events.
 *
 * Each event that the core records on a stream takes the stream's next number; a stream's events
 * complete in the order of their numbers. */
#ifndef ESPER_STREAM_H
#define ESPER_STREAM_H

#include "../base/rules.h"
#include "device.h"

enum {
  STREAM_EVENTS = 32 /* events that a stream keeps for reuse, and as many records; the device keeps
                        the rest (event.h) */
};

/* Streams by index. The bits find the few streams with outstanding records among many. */
enum { GROUP_STREAMS = 64 };

typedef struct stream_group {
  _Atomic uint64_t listed; /* bit i: stream[i] has outstanding records, or had at the last look */
  stream_t *stream[GROUP_STREAMS];
  struct stream_group *older;
} stream_group_t;

struct stream {
  /* Read by every malloc and seldom written. */
  ON_ITS_OWN_LINE void *handle; /* of a mortal stream: only to be shown */
  device_t *device;
  stream_t *next_by_handle; /* immortal ones, by handle */
  _Atomic(heap_t *) heap;   /* its heap of the default pool outside captures and tags, or NULL */
  atomic_bool holds;        /* some free block has a use here without a record */
  atomic_bool kept;         /* no other stream takes over this entry when the stream has ended,
                               because it had a heap or a use without a record */
  atomic_bool immortal;
  atomic_bool was_captured; /* a mortal one, when it was last presented */
  bool all_streams;         /* stands for all streams of the device */
  _Atomic uint64_t id;      /* the driver's, which no later stream gets */
  core_t *core;

  ON_ITS_OWN_LINE _Atomic uint64_t last; /* the last number taken; every free reads it */
  unsigned index;                        /* counts the streams, from 0 */
  bool listed;                           /* its bit in the group is set; under the record lock */
  stream_group_t *group;
  stream_t *next;           /* all streams of the core */
  stream_t *next_in_bucket; /* by id */

  ON_ITS_OWN_LINE mutex_t lock; /* the record lock: guards all below but the atomics, and `last` */
  _Atomic uint64_t completed;   /* every number up to this one has completed */
  record_t *oldest, *newest;    /* outstanding records, by number */
  unsigned outstanding;         /* how many records that list has */
  unsigned ask_at;              /* how many outstanding records make a mark ask */
  record_t *spare;              /* records out of use */
  unsigned spare_count;
  void *events[STREAM_EVENTS]; /* events out of use: the last event_count */
  unsigned event_count;
  atomic_bool has_outstanding;
  _Atomic(record_t *) dropped; /* records without references, not yet spare */
  uint64_t syncing;     /* the number that will be completed by the synchronisation under way */
  record_t *probe;      /* the last record made by stream_probe */
  atomic_int last_wait; /* how it ended: host_wait.c */
};

/* A stream as it was presented, for the length of one call. */
typedef struct presented {
  stream_t *stream;
  void *handle;
  bool asked;       /* whether the driver was asked about its capture, */
  uint64_t capture; /* and what it answered */
} presented_t;

/* Finds or makes the stream that a caller presents. */
esper_status stream_present(core_t *core, esper_stream as, presented_t *presented);

/* Finds the stream of a driver's handle above 2, whatever its device. False: it is not known, or is
 * captured. */
bool stream_find(core_t *core, void *handle, presented_t *presented);

static inline _Atomic(stream_t *) *stream_bucket(core_t *core, const void *handle)
{
  return &core->stream_by_handle[(uintptr_t)handle * 0x9e3779b97f4a7c15u >> 56];
}

/* Finds an immortal stream by its handle, which it keeps for ever. `device` NULL: any. */
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

/* The stream if it is known to be immortal; NULL otherwise. */
static inline stream_t *stream_immortal(core_t *core, const device_t *device, void *handle)
{
  return stream_is_legacy(handle) ? device->legacy : stream_with_handle(core, device, handle);
}

/* An immortal stream as it would be presented. */
static inline presented_t stream_presented(stream_t *stream, void *handle)
{
  return (presented_t){.stream = stream, .handle = stream_is_legacy(handle) ? NULL : handle};
}

/* Finds or makes the stream with that id. NULL: no host memory. */
stream_t *stream_create(core_t *core, device_t *device, uint64_t id, void *handle);
/* From now on the handle alone identifies the stream. */
void stream_make_immortal(core_t *core, stream_t *stream, void *handle);
/* Makes a stream of the core's own with the driver. It is immortal. */
esper_status stream_create_own(device_t *device, stream_t **own);
void stream_destroy_all(core_t *core);

#define CAPTURE_UNKNOWN UINT64_MAX /* the driver did not say which capture */

static inline bool stream_completed(const stream_t *stream, uint64_t number)
{
  return atomic_load(&stream->completed) >= number;
}

/* The stamp of a block that the stream frees now. */
static inline uint64_t stream_stamp(const stream_t *stream)
{
  return atomic_load(&stream->last) + (RULE(STAMP_IS_NEXT) ? 1 : 0);
}

/* The stream with that index. */
stream_t *stream_at(core_t *core, unsigned index);

#endif
