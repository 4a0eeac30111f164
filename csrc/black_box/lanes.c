#include "lanes.h"

#include <stdatomic.h>

#include "lock.h"

enum { PLACES = 2 * MOST_LANES };

static box_lane_item_t items[MOST_LANES] = {{.device = -1}};
static atomic_uint count = 1;
static _Atomic uint16_t places[PLACES]; /* read without the lock; never emptied */

static unsigned begin_of(int device, uint64_t stream, const uint64_t pool[2])
{
  uint64_t key = stream ^ (uint64_t)(unsigned)device << 56 ^ pool[0] << 20 ^ pool[1] << 40;
  return (unsigned)(key * UINT64_C(0x9e3779b97f4a7c15) >> 48) & (PLACES - 1);
}

static bool is_of(unsigned lane, int device, uint64_t stream, const uint64_t pool[2])
{
  const box_lane_item_t *item = &items[lane];
  return item->device == device && item->stream == stream && item->pool[0] == pool[0] &&
         item->pool[1] == pool[1];
}

/* The lane's number; 0, and in *place where it belongs: there is none. */
static unsigned look(int device, uint64_t stream, const uint64_t pool[2], unsigned *place)
{
  for (*place = begin_of(device, stream, pool);; *place = (*place + 1) & (PLACES - 1)) {
    unsigned lane = atomic_load_explicit(&places[*place], memory_order_acquire);
    if (!lane || is_of(lane, device, stream, pool))
      return lane;
  }
}

static unsigned add(int device, uint64_t stream, const uint64_t pool[2])
{
  unsigned place;
  box_lock();
  unsigned lane = look(device, stream, pool, &place);
  unsigned next = atomic_load_explicit(&count, memory_order_relaxed);
  if (!lane && next < MOST_LANES) {
    lane = next;
    items[lane] = (box_lane_item_t){.device = device, .stream = stream, .pool = {pool[0], pool[1]}};
    atomic_store_explicit(&places[place], (uint16_t)lane, memory_order_release);
    atomic_store_explicit(&count, next + 1, memory_order_release);
  }
  box_unlock();
  return lane;
}

unsigned lane_of(int device, const void *stream, const uint64_t pool[2])
{
  unsigned place, lane = look(device, (uintptr_t)stream, pool, &place);
  bool full = atomic_load_explicit(&count, memory_order_relaxed) == MOST_LANES;
  return lane || full ? lane : add(device, (uintptr_t)stream, pool);
}

void lane_carry(unsigned lane, int64_t bytes)
{
  items[lane].before += bytes;
}

void lanes_forget(void)
{
  for (unsigned lane = 0; lane < lanes_count(); lane++)
    items[lane].before = 0;
}

unsigned lanes_count(void)
{
  return atomic_load_explicit(&count, memory_order_acquire);
}

box_lane_item_t lane_item(unsigned lane)
{
  return items[lane];
}

bool lanes_are_valid(void)
{
  bool valid = true;
  for (unsigned lane = 1, place; lane < lanes_count(); lane++)
    valid &= look(items[lane].device, items[lane].stream, items[lane].pool, &place) == lane;
  return valid;
}
