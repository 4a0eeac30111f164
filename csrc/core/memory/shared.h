/* shared.h: pages of this core that other processes may open.
 *
 * A page that was named is shared: it neither moves nor goes back, whatever becomes of the
 * blocks on it, until nothing on it is live and esper_unshare() takes the name back. */
#ifndef ESPER_SHARED_H
#define ESPER_SHARED_H

#include "page.h"

/* A page that other processes may open. */
struct shared {
  esper_page_name name;
  segment_t *segment;
  size_t first; /* granule of the segment */
  shared_t *next;
};

/* Of what esper_share() says. */
esper_status shared_name(core_t *core, const void *ptr, void **address, esper_page_name **pages,
                         size_t *count);

/* Takes back the names of pages on which nothing is live, `always` of all: how many. */
size_t shared_forget(device_t *device, bool always);

#endif
