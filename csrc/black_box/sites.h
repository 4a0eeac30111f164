/* sites.h: numbers for places in the program, and their names. */
#ifndef ESPER_BLACK_BOX_SITES_H
#define ESPER_BLACK_BOX_SITES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The number of a place that has this hash; 0: it has none. Takes no lock. */
unsigned site_find(uint64_t hash);

/* Numbers a place, and keeps its name: UTF-8, a line for each frame, the innermost first. Places of
 * the same name share a number. 0: there are too many, or there is no host memory. */
unsigned site_add(uint64_t hash, const char *name, size_t length);

/* Whether no further place can be added. */
bool sites_are_full(void);

/* How many numbers there are, 0 included, and a name, which stays. With the box's lock held. */
unsigned sites_count(void);
const char *site_name(unsigned site, uint32_t *length);
size_t sites_bytes(void);

bool sites_are_valid(void);

#endif
