#include "fence.h"

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "driver_pages.h"
#include "mapped.h"
#include "peers.h"
#include "segment.h"

/* Addresses are reserved in ranges of this many times the device's memory. */
enum { RANGE_SHARE = 4 };

/* Bytes of addresses for a fence: its pages, and a granule that stays empty, so that the pages of
 * two fences never touch. */
static size_t extent_of(const device_t *device, size_t size)
{
  return size + device->granule;
}

/* ---- addresses ----------------------------------------------------------- */

/* 0: no fence that is still there has any of these addresses. Otherwise the bytes from `address` to
 * the end of such a fence's extent. */
static size_t occupied(const device_t *device, uintptr_t address, size_t extent)
{
  for (const segment_t *s = device->first_segment; s; s = s->next)
    if (s->fenced && s->address < address + extent && address < s->address + s->size)
      return extent_of(device, s->address + s->size - address);
  return 0;
}

/* 0: the end of the last range was reached. Under the lock. */
static uintptr_t take_addresses(device_t *device, size_t extent)
{
  fences_t *f = &device->fences;
  while (f->current < f->count) {
    size_t left = f->range[f->current].size - f->used, taken;
    if (left < extent) {
      f->current++;
      f->used = 0;
      continue;
    }
    uintptr_t address = f->range[f->current].address + f->used;
    taken = f->rounds || !RULE(FENCE_ADDRESSES_ONCE) ? occupied(device, address, extent) : 0;
    if (!taken) {
      f->used += extent;
      return address;
    }
    f->used += taken < left ? taken : left;
  }
  return 0;
}

static void begin_again(device_t *device)
{
  device->fences.current = 0;
  device->fences.used = 0;
}

/* Begins with the oldest addresses again. Under the lock. */
static uintptr_t come_round(device_t *device, size_t extent)
{
  begin_again(device);
  device->fences.rounds++;
  return take_addresses(device, extent);
}

static esper_status place(device_t *device, size_t extent, uintptr_t *address)
{
  size_t usual = round_to_granule(device, RANGE_SHARE * device->total);
  for (esper_status status = ESPER_OK;;) {
    lock(&device->lock);
    *address = take_addresses(device, extent);
    bool is_last = device->fences.count == FENCE_RANGES || status != ESPER_OK;
    if (!*address && is_last && device->fences.count)
      *address = come_round(device, extent);
    unlock(&device->lock);
    if (*address)
      return ESPER_OK;
    if (is_last)
      return status == ESPER_OK ? ESPER_OUT_OF_MEMORY : error_from_driver(device->core, status);
    uintptr_t range;
    size_t size = extent > usual ? extent : usual;
    status = call_range_reserve(device->core, device->index, size, &range);
    if (status != ESPER_OK)
      continue;
    lock(&device->lock);
    device->fences.range[device->fences.count].address = range;
    device->fences.range[device->fences.count++].size = size;
    unlock(&device->lock);
  }
}

/* ---- pages --------------------------------------------------------------- */

/* Maps new pages at the next addresses, for the device and its peers. */
static esper_status fence_raise(device_t *device, size_t size, uintptr_t *address, uint64_t *page,
                                size_t *missing)
{
  esper_status status = driver_page_create(device, size, page);
  if (status != ESPER_OK)
    return status;
  /* Addresses last, so that a request without memory uses none up. */
  status = place(device, extent_of(device, size), address);
  if (status == ESPER_OUT_OF_MEMORY)
    *missing = extent_of(device, size);
  if (status == ESPER_OK)
    status = driver_page_map(device, *address, size, *page);
  if (status != ESPER_OK)
    driver_page_release(device, *page);
  return status;
}

void fence_lower(segment_t *s)
{
  driver_page_unmap(s->device, s->address, s->size);
  driver_page_release(s->device, s->fence_page);
  if (!RULE(FENCE_ADDRESSES_ONCE))
    begin_again(s->device);
}

/* ---- segments ------------------------------------------------------------ */

/* What is in front of the block is never handed out. NULL: no host memory. */
static block_t *cut_front(block_t *whole, size_t size)
{
  block_t *block = block_make(whole->segment->device, whole->segment, 0, size);
  if (!block)
    return NULL;
  block_set_state(block, BLOCK_CLAIMED);
  whole->size -= size;
  whole->next = block;
  block->prev = whole;
  return block;
}

/* Makes a segment without memory. Stores the block that will be handed out. NULL: no host memory.
 * Under the lock. */
static segment_t *make(heap_t *heap, size_t size, bool large, block_t **block)
{
  device_t *device = heap->device;
  size_t pages = round_to_granule(device, size);
  block_t *whole = segment_make(heap, pages, large);
  if (!whole)
    return NULL;
  block_set_state(whole, BLOCK_CLAIMED);
  *block = size < pages ? cut_front(whole, size) : whole;
  if (*block) {
    whole->segment->fenced = true;
    return whole->segment;
  }
  segment_discard(device, whole);
  return NULL;
}

esper_status fence_obtain(heap_t *heap, size_t size, bool large, block_t **block, size_t *missing)
{
  device_t *device = heap->device;
  block_t *made = NULL;
  *block = NULL;
  *missing = 0;
  if (!mapped_granule(device))
    return error_set(ESPER_UNSUPPORTED,
                     "device %d cannot map pages, so its memory gets no fence: end the fence",
                     device->index);
  size_t pages = round_to_granule(device, size);
  lock(&device->lock);
  esper_status status = segment_check_limits(device, pages);
  segment_t *s = status == ESPER_OK ? make(heap, size, large, &made) : NULL;
  if (status == ESPER_OK && !s)
    status = error_set(ESPER_HOST_MEMORY, "no host memory for a segment");
  unlock(&device->lock);
  if (status != ESPER_OK)
    return status;

  uintptr_t address = 0;
  status = fence_raise(device, pages, &address, &s->fence_page, missing);
  lock(&device->lock);
  if (status == ESPER_OK)
    segment_add(*block = made, address);
  else
    segment_discard(device, s->first);
  unlock(&device->lock);
  return status;
}

/* The segment stays in the lists until its pages are gone, so that no other fence gets its
 * addresses. */
void fence_release(device_t *device, block_t *block)
{
  segment_t *s = block->segment;
  fence_lower(s);
  lock(&device->lock);
  device->refused = 0;
  segment_leaves(device, block);
  segment_discard(device, s->first);
  unlock(&device->lock);
}

uint64_t fence_rounds(const device_t *device)
{
  return device->fences.rounds;
}

void fences_destroy(device_t *device)
{
  for (int i = 0; i < device->fences.count; i++)
    driver_range_free(device, device->fences.range[i].address, device->fences.range[i].size);
}

/* Whether some range has these addresses and a granule behind them. */
static bool is_in_range(const device_t *device, const segment_t *s)
{
  for (int i = 0; i < device->fences.count; i++) {
    uintptr_t begin = device->fences.range[i].address;
    if (s->address >= begin &&
        s->address - begin + extent_of(device, s->size) <= device->fences.range[i].size)
      return true;
  }
  return false;
}

bool fences_are_valid(const device_t *device)
{
  const fences_t *f = &device->fences;
  for (const segment_t *s = device->first_segment; s; s = s->next) {
    if (!s->fenced)
      continue;
    const block_t *last = s->first->next ? s->first->next : s->first;
    bool is_right = !s->pages && s->size % device->granule == 0 && is_in_range(device, s) &&
                    !last->next && last->size + device->granule > s->size &&
                    (last == s->first || s->first->state == BLOCK_CLAIMED) &&
                    last->state != BLOCK_READY && last->state != BLOCK_CACHED &&
                    (last->state != BLOCK_PENDING || last->withheld || !RULE(FENCED_SERVES_ONCE));
    if (!is_right)
      return false;
  }
  return f->current <= f->count && f->count <= FENCE_RANGES &&
         (f->current == f->count || f->used <= f->range[f->current].size);
}
