/* carried.h: what chunks that are gone leave behind: the live allocations, and the bytes of
 * segments. With the box's lock held. */
#ifndef ESPER_BLACK_BOX_CARRIED_H
#define ESPER_BLACK_BOX_CARRIED_H

#include "chunks.h"

/* Takes the events of a chunk over. All chunks that are left began at `since` or later. */
void carry(const chunk_t *chunk, uint64_t since);

/* How many places there are, and what happened last at one; false: nothing, or a free from before
 * `since`. */
size_t carried_places(void);
bool carried_at(size_t place, uint64_t since, box_live_item_t *last);
size_t carried_bytes(void);
/* The time of the latest event that was taken over. */
uint64_t carried_until(void);

/* How often the places changed their numbers. */
uint64_t carried_moved(void);

bool carried_is_valid(void);
void carried_forget(void);

#endif
