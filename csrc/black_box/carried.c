#include "carried.h"

#include <stdlib.h>

#include "lanes.h"

/* The last event at an address. Chunks of several threads do not go in the order of their
 * events, so a free is kept until no older event can come. */
typedef struct place {
  uint64_t address; /* / 512 + 1; 0: empty */
  uint64_t ticks;
  uint64_t second; /* of the allocation; 0: freed */
} place_t;

enum { MOST_KEPT = 1 << 19 };

static place_t *places;
static size_t capacity, used; /* a power of two, or 0 */
static uint64_t until, moved;

static size_t begin_of(uint64_t key)
{
  return (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 20) & (capacity - 1);
}

/* The place of a key, or the empty one where it belongs. */
static place_t *find(uint64_t key)
{
  size_t at = begin_of(key);
  while (places[at].address && places[at].address != key)
    at = (at + 1) & (capacity - 1);
  return &places[at];
}

bool carried_at(size_t place, uint64_t since, box_live_item_t *last)
{
  const place_t *p = &places[place];
  if (!p->address || (!p->second && p->ticks < since))
    return false;
  *last = (box_live_item_t){(p->address - 1) << ADDRESS_SHIFT, box_size(p->second), p->ticks,
                            box_lane(p->second), box_site(p->second)};
  return true;
}

/* Makes room, and forgets frees from before `since`; where there are too many, all frees. */
static bool make_room(uint64_t since)
{
  box_live_item_t unused;
  size_t kept = 0, wider = 1024;
  for (size_t i = 0; i < capacity; i++)
    kept += carried_at(i, since, &unused);
  if (kept > MOST_KEPT) {
    since = UINT64_MAX;
    kept = 0;
    for (size_t i = 0; i < capacity; i++)
      kept += carried_at(i, since, &unused);
  }
  while (wider < 4 * kept)
    wider *= 2;
  place_t *old = places, *made = calloc(wider, sizeof *made);
  if (!made)
    return false;
  size_t before = capacity;
  places = made;
  capacity = wider;
  used = kept;
  for (size_t i = 0; i < before; i++)
    if (old[i].address && (old[i].second || old[i].ticks >= since))
      *find(old[i].address) = old[i];
  free(old);
  moved++;
  return true;
}

static void carry_event(uint64_t address, uint64_t ticks, uint64_t second, uint64_t since)
{
  if (used >= capacity / 2 && !make_room(since) && used + 1 >= capacity)
    return; /* there is no host memory */
  uint64_t key = (address >> ADDRESS_SHIFT) + 1;
  place_t *place = find(key);
  if (place->address && place->ticks > ticks)
    return;
  used += !place->address;
  *place = (place_t){key, ticks, second};
}

void carry(const chunk_t *chunk, uint64_t since)
{
  uint64_t from = chunk->ticks;
  unsigned words = atomic_load_explicit(&chunk->words, memory_order_acquire);
  for (unsigned at = 0; at < words;) {
    uint64_t first = chunk->word[at], second = chunk->word[at + 1 < CHUNK_WORDS ? at + 1 : at];
    unsigned kind = box_kind(first);
    uint64_t ticks = from + box_ticks(first);
    switch (kind) {
    case BOX_TIME: from = first >> 4; break;
    case BOX_ALLOC: carry_event(box_address(first), ticks, second, since); break;
    case BOX_FREE: carry_event(box_address(first), ticks, 0, since); break;
    case BOX_SEGMENT_ALLOC:
    case BOX_SEGMENT_MAP: lane_carry(box_lane(second), (int64_t)box_size(second)); break;
    case BOX_SEGMENT_FREE:
    case BOX_SEGMENT_UNMAP: lane_carry(box_lane(second), -(int64_t)box_size(second)); break;
    default: break;
    }
    until = ticks > until && kind != BOX_TIME ? ticks : until;
    at += (unsigned)box_words(kind);
  }
}

void carried_forget(void)
{
  free(places);
  places = NULL;
  capacity = used = 0;
  until = 0;
}

size_t carried_places(void)
{
  return capacity;
}

uint64_t carried_until(void)
{
  return until;
}

uint64_t carried_moved(void)
{
  return moved;
}

size_t carried_bytes(void)
{
  return capacity * sizeof *places;
}

bool carried_is_valid(void)
{
  size_t found = 0;
  bool valid = used <= capacity;
  for (size_t i = 0; i < capacity; i++) {
    found += places[i].address != 0;
    valid &= !places[i].address || find(places[i].address) == &places[i];
  }
  return valid && found == used;
}
