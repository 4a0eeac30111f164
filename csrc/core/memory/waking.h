/* waking.h: how pages that sleep wake: which of them must, mapping one, and undoing that. Without
 * the lock, under the device's sleep lock. */
#ifndef ESPER_WAKING_H
#define ESPER_WAKING_H

#include "asleep.h"

typedef struct waking {
  device_t *device;
  const bool *tags;
  void *spares; /* blocks for the splits when the wake ends, linked by their first word */
  size_t bytes; /* of the pages that come back */
} waking_t;

/* The lists of these tags, one after the other. */
static inline sleeping_t *waking_next(const waking_t *w, const sleeping_t *list)
{
  sleeping_t *next = list ? list->next : w->device->sleeping;
  while (next && !w->tags[next->tag])
    next = next->next;
  return next;
}

static inline sleeping_t *waking_first(const waking_t *w)
{
  return waking_next(w, NULL);
}

/* Finds the pages that need not come back, because one freed block that owes nothing fills them.
 * ESPER_OUT_OF_MEMORY, ESPER_REJECTED: the others would pass a limit of the device. */
esper_status waking_begin(waking_t *w);

/* Maps new memory where the page was. ESPER_OUT_OF_MEMORY, ESPER_REJECTED: as waking_begin, or the
 * driver has none. */
esper_status waking_map(const waking_t *w, const sleeping_page_t *page);

/* After an error, unless the device has failed: what was mapped goes back. */
void waking_undo(const waking_t *w);

/* Ends the wake. `done`: all pages have come; otherwise all sleep as before. */
void waking_end(waking_t *w, bool done);

#endif
