#include "block_cache.h"

#include "../base/call.h"
#include "../base/config.h"
#include "../order/stream.h"
#include "../stats/stat.h"
#include "../stats/stat_shard.h"
#include "../stats/stats.h"
#include "block.h"
#include "cache_slots.h"

/* ---- the choice ---------------------------------------------------------- */

static bool is_ready(const block_t *neighbour)
{
  return neighbour && block_state_of(neighbour) == BLOCK_READY;
}

/* Whether a best fit among the ready blocks, with this one merged in, would be taken from where
 * this one begins. If not, handing it out would keep a large range in pieces. Among equal sizes
 * this block wins. */
static bool fits_best(const heap_t *heap, const block_t *block)
{
  const bins_t *bins = &heap->ready[block->segment->large];
  if (!bins->count)
    return true;
  if (is_ready(block->prev))
    return false;
  const block_t *rest = is_ready(block->next) ? block->next : NULL;
  const block_t *other = bins_best_fit(bins, block->size);
  if (other && other == rest)
    other = bins_next(bins, rest);
  return !other || other->size >= block->size + (rest ? rest->size : 0);
}

/* What choose() found holds for the cache's generation. Of a block with ready neighbours it holds
 * only while no other block of its size is cached: another might have no ready neighbours. */
enum { FITS_ALONE = 1 };

static inline bool is_known_to_fit(const block_cache_t *cache, int slot, const block_t *block)
{
  return block->fits_best >> 1 == cache->generation &&
         (block->fits_best & FITS_ALONE || cache->count[slot] == 1);
}

/* The index of the block to take; -1: none. */
__attribute__((noinline)) static int choose(heap_t *heap, int slot)
{
  enum { LOOK_AT = 8 };
  block_cache_t *cache = &heap->cache;
  int top = cache->count[slot] - 1, chosen = -1;
  for (int i = top; i >= 0 && top - i < LOOK_AT; i--) {
    block_t *block = cache->block[slot][i];
    bool alone = !is_ready(block->prev) && !is_ready(block->next);
    if ((chosen >= 0 && !alone) || !fits_best(heap, block))
      continue;
    block->fits_best = (uint16_t)(cache->generation << 1 | (alone ? FITS_ALONE : 0));
    chosen = i;
    if (alone)
      break;
  }
  return chosen;
}

static inline block_t *find(heap_t *heap, size_t size, int *slot, int *index)
{
  block_cache_t *cache = &heap->cache;
  *slot = slot_with(cache, units_of(size));
  if (*slot < 0)
    return NULL;
  *index = cache->count[*slot] - 1;
  block_t *block = cache->block[*slot][*index];
  if (__builtin_expect(is_known_to_fit(cache, *slot, block), 1))
    return block;
  *index = choose(heap, *slot);
  return *index < 0 ? NULL : cache->block[*slot][*index];
}

static inline void make_live(block_t *block, size_t asked)
{
  block->requested = asked;
  block->counted_active = true;
  block_set_state(block, BLOCK_LIVE);
}

/* ---- malloc and free ----------------------------------------------------- */

static bool is_captured(core_t *core, heap_t *heap, void *handle)
{
  uint64_t capture = 0;
  uint64_t queries = atomic_load_explicit(&heap->cache.queries, memory_order_relaxed);
  atomic_store_explicit(&heap->cache.queries, queries + 1, memory_order_relaxed);
  const esper_driver *driver = core->driver;
  esper_status status = driver->stream_capture(driver->self, heap->device->index, handle, &capture);
  return (status != ESPER_OK && call_end(core, status)) || capture;
}

static inline bool serve(core_t *core, esper_stream as, size_t requested, cache_attempt_t *attempt,
                         void **ptr)
{
  if (tag_current() != TAG_NONE)
    return false;
  stream_t *stream = stream_immortal(core, &core->devices[as.device], as.handle);
  heap_t *heap = stream ? atomic_load_explicit(&stream->heap, memory_order_acquire) : NULL;
  attempt->stream = stream;
  if (!heap || atomic_load_explicit(&stream->holds, memory_order_relaxed) ||
      core_is(core, CORE_SHUT_DOWN | CORE_FENCED))
    return false;
  const config_t *config = config_of(core);
  size_t size = config_round(config, requested);
  attempt->size = size;
  if (!size || config_is_oversize(config, size))
    return false;
  if (stream->handle && RULE(CAPTURE_KEEPS_APART)) {
    if (is_captured(core, heap, stream->handle))
      return false;
    attempt->asked = true;
  }
  block_cache_t *cache = &heap->cache;
  if (!cache_enter(cache, LATCH_HELD))
    return false;
  lock_order_take(LOCK_CACHE);
  int slot, index;
  block_t *block = find(heap, size, &slot, &index);
  attempt->missed = !block;
  bool taken = block && shard_take(&heap->device->credit, &cache->shard, block->segment->large,
                                   (amounts_t){1, (int64_t)size, (int64_t)requested});
  if (taken) {
    slots_take(cache, slot, index);
    make_live(block, requested);
    *ptr = (void *)block->address;
  }
  lock_order_leave(LOCK_CACHE);
  /* After a miss, malloc comes back with the device's lock and empties the cache. */
  cache_leave(cache, block ? LATCH_OPEN : LATCH_CLOSED);
  return taken;
}

bool cache_malloc(core_t *core, esper_stream as, size_t requested, cache_attempt_t *attempt,
                  void **ptr)
{
  cache_attempt_t found = {0};
  if (serve(core, as, requested, &found, ptr))
    return true;
  *attempt = found; /* only now: a malloc that is served does not read it */
  return false;
}

/* Of a live block. An observer that begins may be adding some, under the device's lock. */
static bool owes_uses(block_t *block)
{
  return __atomic_load_n(&block->uses, __ATOMIC_RELAXED) && RULE(CACHE_OWES_NOTHING);
}

bool cache_free(block_t *block, uintptr_t address)
{
  segment_t *segment = block_segment_if_any(block);
  if (!segment)
    return false;
  heap_t *heap = segment_home(segment);
  block_cache_t *cache = &heap->cache;
  if (owes_uses(block) || !block->plain || !cache_enter(cache, LATCH_HELD))
    return false;
  lock_order_take(LOCK_CACHE);
  /* Checked again under the latch. That finds frees of blocks that are not live, and uses that an
   * observer adds, when it begins, to blocks that it does not hold. */
  bool kept = block_is_live_at(block, address) && !owes_uses(block) && block->segment == segment &&
              segment_home(segment) == heap && slots_push(cache, block);
  if (kept) {
    block_expect_neighbours(block);
    shard_return(&segment->device->credit, &cache->shard, segment->large, amounts_of(block));
    block->counted_active = false;
    if (RULE(CACHE_STAMPS))
      block->stamp = stream_stamp(owner_order_stream(heap));
    block_set_state(block, BLOCK_CACHED);
  }
  lock_order_leave(LOCK_CACHE);
  cache_leave(cache, LATCH_OPEN);
  return kept;
}

/* ---- under the device's lock ---------------------------------------------- */

void cache_init(block_cache_t *cache)
{
  atomic_store_explicit(&cache->latch, LATCH_CLOSED, memory_order_relaxed);
  cache->generation = 1;
}

block_t *cache_take(heap_t *heap, size_t size, size_t requested)
{
  int slot, index;
  block_t *block = find(heap, size, &slot, &index);
  if (block) {
    slots_take(&heap->cache, slot, index);
    make_live(block, requested);
  }
  return block;
}

bool cache_claim_live(block_t *block, uintptr_t address)
{
  if (block_state_of(block) == BLOCK_GONE)
    return false;
  block_cache_t *cache = &block->segment->heap->cache;
  cache_pause(cache);
  bool live = block_is_live_at(block, address);
  if (live) {
    block_set_state(block, BLOCK_CLAIMED);
    shard_free(&block->segment->device->credit, &cache->shard, block->segment->large,
               amounts_of(block));
  }
  cache_resume(cache);
  return live;
}

uint64_t caches_queries(device_t *device)
{
  uint64_t queries = 0;
  lock(&device->lock);
  for (const heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    queries += atomic_load_explicit(&heap->cache.queries, memory_order_relaxed);
  unlock(&device->lock);
  return queries;
}

/* ---- counting ---------------------------------------------------------------- */

/* Without enough credit: pauses all caches, reads all shards and raises the peaks. */
static void count_past_credit(device_t *device, block_t *block)
{
  caches_pause(device);
  shard_overdraw(&block->segment->heap->cache.shard, block->segment->large, amounts_of(block));
  shards_read(device);
  stats_raise_peaks(&device->stats);
  shards_grant(device, block);
  caches_resume(device);
}

void cache_count_allocated(block_t *block)
{
  device_t *device = block->segment->device;
  block_cache_t *cache = &block->segment->heap->cache;
  cache_pause(cache);
  if (!shard_take(&device->credit, &cache->shard, block->segment->large, amounts_of(block)))
    count_past_credit(device, block);
  cache_resume(cache);
  if (block->oversize)
    stat_add(&device->stats.oversize_allocations, 1);
}

void cache_count_satisfied(const block_t *block)
{
  block_cache_t *cache = &block->segment->heap->cache;
  cache_pause(cache);
  shard_satisfy(&block->segment->device->credit, &cache->shard, block->segment->large,
                amounts_of(block));
  cache_resume(cache);
}

/* ---- checking ---------------------------------------------------------------- */

bool cache_is_valid(heap_t *heap)
{
  block_cache_t *cache = &heap->cache;
  bool valid = cache->state <= CACHE_LOCKED;
  size_t blocks = 0;
  cache_pause(cache);
  valid &= cache->generation && !(cache->generation >> 15);
  for (unsigned slot = 0; slot < CACHE_SLOTS; slot++) {
    blocks += cache->count[slot];
    valid &= cache->count[slot] <= CACHE_DEPTH &&
             (cache->filled >> slot & 1) == (cache->count[slot] > 0);
    for (unsigned i = 0; i < cache->count[slot] && valid; i++) {
      const block_t *b = cache->block[slot][i];
      valid = b->state == BLOCK_CACHED && !b->uses && !b->withheld && !b->counted_active &&
              b->segment->heap == heap && b->size == (size_t)cache->units[slot] * BLOCK_ALIGN &&
              slot_of(cache->units[slot]) >> 1 == slot >> 1;
      for (unsigned k = 0; k < i; k++)
        valid &= cache->block[slot][k] != b;
    }
  }
  valid &= !blocks || !cache_is_closed(cache);
  cache_resume(cache);
  return valid;
}
