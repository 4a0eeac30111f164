/* esper_sleep.h: tags, which name groups of memory. */
#ifndef ESPER_SLEEP_H
#define ESPER_SLEEP_H

#include "esper_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------
 * Tags
 * ---------------------------------------------------------------------- */

/* From now on memory that the calling thread allocates, in whatever core, has the tag `name`, until
 * esper_tag_pop. Tags nest, and the innermost counts; memory has one tag, or none. Memory of
 * different tags shares no page and no segment, and free memory of one tag serves no request under
 * another; whole pages move between them. Tags have no effect on other threads. ESPER_INVALID: the
 * name is empty or has more than 63 bytes, the process has 255 tags already, or the thread has
 * pushed 64. */
ESPER_API esper_status esper_tag_push(const char *name);

/* Takes back the thread's last esper_tag_push. ESPER_INVALID: there is none. */
ESPER_API esper_status esper_tag_pop(void);

/* The calling thread's innermost tag; "": none. Lives as long as the process. */
ESPER_API const char *esper_tag_current(void);

/* The memory of one tag on one device, in bytes. */
typedef struct esper_tag_stats {
  const char *name; /* "": memory without a tag. Lives as long as the process */
  size_t allocated; /* live */
  size_t reserved;  /* of device memory, free memory included */
} esper_tag_stats;

/* Copies the figures of the tags that have memory on the device into *tags (freed with free()), the
 * memory without a tag first. *count becomes their number. */
ESPER_API esper_status esper_get_tag_stats(esper_core *core, int device, esper_tag_stats **tags,
                                           size_t *count);

#ifdef __cplusplus
}
#endif
#endif
