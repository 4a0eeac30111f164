/* waking.h: how pages that sleep wake: which of them must, mapping one, and undoing that. Without
 * the lock, under the device's sleep lock. */
#ifndef ESPER_WAKING_H
#define ESPER_WAKING_H

#include "asleep.h"

typedef struct waking {
  device_t *device;
  const bool *tags;
  void *spares; /* blocks for the splits at the end, linked by their first word */
  size_t bytes; /* of the pages that come back */
} waking_t;

/* The lists of the device that have pages of these tags, one after the other. */
sleeping_t *waking_first(const waking_t *w);
sleeping_t *waking_next(const waking_t *w, const sleeping_t *list);

/* Finds the pages that need not come back, because one freed block fills them. Out of memory: the
 * others would exceed the device's limit. */
esper_status waking_begin(waking_t *w);

/* Maps new memory where the page was. */
esper_status waking_map(const waking_t *w, const sleeping_page_t *page);

/* There was too little memory: what was mapped goes back. */
void waking_undo(const waking_t *w);

/* All pages have come, or (not `done`) all sleep as before. */
void waking_end(waking_t *w, bool done);

#endif
