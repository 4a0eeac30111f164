/* choose.h: which pages of some tags can go to sleep, and which of their bytes are kept. */
#ifndef ESPER_CHOOSE_H
#define ESPER_CHOOSE_H

#include "../../esper_sleep.h"
#include "asleep.h"

typedef struct choice {
  device_t *device;
  const bool *tags;
  bool keeps;                             /* their bytes are kept, or only the addresses */
  sleeping_t *of[TAGS];                   /* the lists that the pages are added to */
  sleeping_t *(*list)(device_t *, tag_t); /* an empty list of the tag; NULL: no host memory */
  esper_sleep_result *result;             /* `stays` gets the bytes that cannot go */
} choice_t;

/* Marks as asleep each page of these tags that can go, and adds it and what is to be kept of it to
 * the list of its tag. Free blocks on these pages serve nothing any more. ESPER_HOST_MEMORY: some
 * pages were marked, and the caller undoes that. Under the sleep lock, not the device's. */
esper_status choose_pages(choice_t *choice);

#endif
