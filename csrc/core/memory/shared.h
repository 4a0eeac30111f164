/* shared.h: pages that other processes may open. A page that has a name is shared: it neither moves
 * nor goes back, whatever becomes of the blocks on it, until nothing on it is live and
 * esper_unshare() withdraws the name. */
#ifndef ESPER_SHARED_H
#define ESPER_SHARED_H

#include "page_table.h"

struct shared {
  esper_page_name name;
  segment_t *segment;
  size_t first; /* its first granule in the segment */
  shared_t *next;
};

/* See esper_share(). */
esper_status shared_name(core_t *core, const void *ptr, void **address, esper_page_name **pages,
                         size_t *count);

/* Withdraws the names of pages on which nothing is live, with `always` those of all pages. Returns
 * their number. */
size_t shared_forget(device_t *device, bool always);

#endif
