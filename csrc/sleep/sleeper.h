/* sleeper.h: where the host keeps what one call has put to sleep of one tag. Under the device's
 * sleep lock. */
#ifndef ESPER_SLEEPER_H
#define ESPER_SLEEPER_H

#include "../core/memory/asleep.h"
#include "pinned_memory.h"

/* After its pages woke, a sleeper is empty, and keeps its pinned memory for the next sleep of its
 * tag. */
typedef struct sleeper {
  sleeping_t list; /* the first member: the device's lists are those of sleepers */
  pinned_memory_t pinned;
} sleeper_t;

static inline sleeper_t *sleeper_with(sleeping_t *list)
{
  return (sleeper_t *)list;
}

/* An empty sleeper of the tag, as its list. NULL: no host memory. */
sleeping_t *sleeper_of(device_t *device, tag_t tag);

/* Makes the pinned memory as large as what is kept. */
esper_status sleeper_fit(sleeper_t *sleeper, device_t *device);

/* Frees the pinned memory of all sleepers that keep no bytes, and the sleepers that are empty. With
 * `always`: all sleepers and their pinned memory. */
void sleepers_trim(device_t *device, bool always);

/* Calls `copy` for each piece of a parcel: a parcel may lie in several chunks of pinned memory. */
typedef esper_status sleeper_copy_t(device_t *device, uintptr_t address, char *host, size_t size);
void sleeper_copy(device_t *device, const sleeper_t *sleeper, const parcel_t *parcel,
                  sleeper_copy_t *copy);

/* Records an event behind the copies. It is tried again, because without an event the device has to
 * be synchronised, which the driver refuses during a capture. NULL: it failed. */
record_t *sleeper_record(presented_t copier);
/* The host waits for the copies before the record, which is dropped. NULL: it waits for all of the
 * device. A device that cannot be waited for has failed. */
void sleeper_wait_for_copies(device_t *device, record_t *record, bool wait);

/* The core's own stream for copies, as presented. An event is made for it now, because memory may
 * be short later. */
esper_status sleeper_stream(device_t *device, presented_t *copier);

/* Finds the tags of these names; `names` NULL: all that there are now. */
esper_status sleeper_tags(const char *const *names, size_t count, bool tags[TAGS]);

#endif
