/* map.h: from an address to its block.
 *
 * A hash table of all blocks, live and free, by their first byte. Finding one takes no lock: chains
 * are walked while others change them. That can make a walk miss, but never mislead, because blocks
 * live in an arena and a hit compares the address. A miss is looked up again under the map's lock.
 * Buckets are added one by one with the blocks, so that the map stays small and never stops to
 * rebuild itself. Segments are kept sorted, for addresses inside a block. */
#ifndef ESPER_MAP_H
#define ESPER_MAP_H

#include "../base/types.h"

typedef struct map map_t;

map_t *map_create(void); /* NULL: no host memory */
void map_destroy(map_t *map);

void map_insert(map_t *map, block_t *block);
void map_remove(map_t *map, block_t *block);
block_t *map_find(map_t *map, uintptr_t address);

bool map_insert_segment(map_t *map, segment_t *segment); /* false: no host memory */
/* Reserves an entry, which one of the next two functions uses up. False: no host memory. */
bool map_reserve_segment(map_t *map);
void map_insert_reserved(map_t *map, segment_t *segment);
void map_unreserve_segment(map_t *map);
/* The segment's entry stays reserved. */
void map_remove_segment(map_t *map, segment_t *segment);
/* The segment around an address, or NULL. It may be gone as soon as this returns, unless the caller
 * knows that the address is live. */
segment_t *map_find_segment(map_t *map, uintptr_t address);

size_t map_bytes(map_t *map);
bool map_is_valid(map_t *map);

#endif
