/* release.h: unused memory goes back to its source (pools/source.h): whole classic segments, and
 * any pages of mapped ones. pool_may_give_back (pools/pool.h) says which pools' memory. */
#ifndef ESPER_RELEASE_H
#define ESPER_RELEASE_H

#include "../base/tag.h"

/* Gives wholly free segments and pages that owe nothing back, those of one pool or
 * (NULL) of all, until at least `enough` bytes were given back. `mind_captures`: while a capture
 * goes on, the default pool keeps its segments; a malloc that is short of memory takes them. */
size_t release_cached(device_t *device, const pool_t *pool, bool mind_captures, size_t enough);

/* The same for the memory of the tags for which `tags` is true. */
size_t release_tagged(device_t *device, const bool tags[TAGS]);

/* A malloc or free passes over this many freed blocks with fences that wait for other streams, so
 * that its time does not grow with their number. While memory is short there is no limit. */
enum { PASSED_OVER = 64 };

/* Unmaps the fences of freed memory that owes nothing. In each heap it stops when it has passed
 * over `most` blocks that wait for other streams than their own. Returns the bytes that went. */
size_t release_fenced(device_t *device, size_t most);

#endif
