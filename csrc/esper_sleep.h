/* esper_sleep.h: tags, which name groups of memory, and sleep: the device memory of tags is given
 * back to the driver, and comes back later at the same addresses, with its contents. */
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
  int asleep;       /* nonzero: no memory is handed out under the tag */
  size_t allocated; /* live, whether it sleeps or not */
  size_t reserved;  /* of device memory, free memory included */
  size_t sleeping;  /* that device memory would be needed for to wake */
  size_t host;      /* of pinned host memory, which keeps contents, or stays for the next sleep */
} esper_tag_stats;

/* Copies the figures of the tags that have memory on the device into *tags (freed with free()), the
 * memory without a tag first. *count becomes their number. */
ESPER_API esper_status esper_get_tag_stats(esper_core *core, int device, esper_tag_stats **tags,
                                           size_t *count);

/* ------------------------------------------------------------------------
 * Sleep
 * ---------------------------------------------------------------------- */

/* What becomes of the contents of live memory. */
typedef enum esper_keep {
  ESPER_KEEP_HOST,   /* copied to pinned host memory of the same size */
  ESPER_KEEP_NOTHING /* lost: the memory wakes full of zeros */
} esper_keep;

/* Why device memory stays where it is. */
typedef enum esper_stays {
  ESPER_STAYS_CLASSIC, /* it is in classic segments, or comes from an allocator of a pool's own */
  ESPER_STAYS_SHARED,  /* other processes may have its pages open */
  ESPER_STAYS_PINNED,  /* esper_pin: its addresses are known elsewhere */
  ESPER_STAYS_IN_USE, /* another call is working on it, or work was enqueued since the call began */
  ESPER_STAYS_COUNT
} esper_stays;

/* A sentence: why that memory stays, and how to avoid it. */
ESPER_API const char *esper_stays_advice(esper_stays reason);

/* In bytes. */
typedef struct esper_sleep_result {
  size_t given_back; /* of device memory, free memory included */
  size_t kept;       /* copied to the host */
  size_t stays[ESPER_STAYS_COUNT];
} esper_sleep_result;

/* Puts the memory of these `count` tags to sleep on `device` (-1: on all devices). "" is memory
 * without a tag; `tags` NULL: all memory. Until esper_wake:
 *   - The addresses stay. Nothing may touch the memory: kernels and copies that do fail. Where that
 *     is seen (esper_note_use), it is refused with ESPER_ASLEEP.
 *   - malloc under the tags fails with ESPER_ASLEEP.
 *   - esper_free works. Pages that one freed block fills do not wake.
 *   - Memory that was already asleep stays as it is, and what is still awake goes.
 * The call first waits, without a limit, for all work on the devices. What cannot go stays as it
 * was, and is counted in *result (may be NULL). Memory that a captured graph may use keeps all its
 * bytes, live or not. ESPER_INVALID: a name is NULL, or no thread has ever pushed a tag of that
 * name. ESPER_CAPTURING: a capture is going on. ESPER_HOST_MEMORY: there is no host memory for the
 * contents. After these errors nothing more sleeps than before on any device, and no contents are
 * lost; memory that was free may have gone back. ESPER_DEVICE_ERROR: a driver did not copy memory,
 * or did not take it back. That device has failed, and its memory does not wake.
 *
 * On each device one thread at a time puts memory to sleep or wakes it. Another waits, without a
 * limit, until that has ended. */
ESPER_API esper_status esper_sleep(esper_core *core, int device, const char *const *tags,
                                   size_t count, esper_keep keep, esper_sleep_result *result);

/* Wakes the memory of these tags, which may then be used on every stream. Tags that are awake are
 * left as they are. *woken (may be NULL) becomes the bytes of device memory that came back.
 * ESPER_OUT_OF_MEMORY: there is not enough device memory, or the memory fraction does not allow it.
 * After any error everything on that device still sleeps, and unless the device has failed
 * (ESPER_DEVICE_ERROR) the call can be repeated. */
ESPER_API esper_status esper_wake(esper_core *core, int device, const char *const *tags,
                                  size_t count, size_t *woken);

/* The bytes of a pool on `device` (-1: on all devices) that sleep. A graph with memory in the pool
 * must not be replayed while there are any. 0: none do, or there is no such pool. */
ESPER_API size_t esper_pool_asleep(esper_core *core, int device, uint64_t id_first,
                                   uint64_t id_second);

/* Gives back the host memory that is kept for the next sleep. */
ESPER_API void esper_sleep_trim(esper_core *core);

#ifdef __cplusplus
}
#endif
#endif
