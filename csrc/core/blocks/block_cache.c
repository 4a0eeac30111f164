#include "block_cache.h"

#include "../base/call.h"
#include "../base/config.h"
#include "../order/stream.h"
#include "../stats/stat_shard.h"
#include "block.h"
#include "cache_slots.h"
#include "free_blocks.h"
#include "trace.h"

/* ---- the choice ---------------------------------------------------------- */

static bool is_ready(const block_t *neighbour)
{
  return neighbour && block_state_of(neighbour) == BLOCK_READY;
}

static bool is_alone(const block_t *block)
{
  return !is_ready(block->prev) && !is_ready(block->next);
}

/* Among the ready blocks, merged, this one need not be the best fit: then handing it
 * out would keep a large range in pieces. Of equals it is. */
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

/* What was found holds until the front is emptied. A block with free memory beside it
 * only while no other of its size is there: that may stand alone. */
enum { FITS_ALONE = 1 };

static inline bool is_known_to_fit(const front_t *front, int slot, const block_t *block)
{
  return block->fits_best >> 1 == front->epoch &&
         (block->fits_best & FITS_ALONE || front->count[slot] == 1);
}

/* The index of the block to take; -1: none. */
__attribute__((noinline)) static int choose(heap_t *heap, int slot)
{
  enum { LOOK_AT = 8 };
  front_t *front = &heap->front;
  int top = front->count[slot] - 1, chosen = -1;
  for (int i = top; i >= 0 && top - i < LOOK_AT; i--) {
    block_t *block = front->block[slot][i];
    bool alone = is_alone(block);
    if ((chosen >= 0 && !alone) || !fits_best(heap, block))
      continue;
    block->fits_best = (uint16_t)(front->epoch << 1 | (alone ? FITS_ALONE : 0));
    chosen = i;
    if (alone)
      break;
  }
  return chosen;
}

static inline block_t *find(heap_t *heap, size_t size, int *slot, int *index)
{
  front_t *front = &heap->front;
  *slot = slot_with(front, units_of(size));
  if (*slot < 0)
    return NULL;
  *index = front->count[*slot] - 1;
  block_t *block = front->block[*slot][*index];
  if (__builtin_expect(is_known_to_fit(front, *slot, block), 1))
    return block;
  *index = choose(heap, *slot);
  return *index < 0 ? NULL : front->block[*slot][*index];
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
  uint64_t questions = atomic_load_explicit(&heap->front.questions, memory_order_relaxed);
  atomic_store_explicit(&heap->front.questions, questions + 1, memory_order_relaxed);
  const esper_driver *driver = core->driver;
  esper_status status = driver->stream_capture(driver->self, heap->device->index, handle, &capture);
  return (status != ESPER_OK && call_end(core, status)) || capture;
}

static inline bool serve(core_t *core, esper_stream as, size_t requested, front_try_t *try,
                         void **ptr)
{
  stream_t *stream = stream_immortal(core, &core->devices[as.device], as.handle);
  heap_t *heap = stream ? atomic_load_explicit(&stream->heap, memory_order_acquire) : NULL;
  try->stream = stream;
  if (!heap || atomic_load_explicit(&stream->holds, memory_order_relaxed) ||
      atomic_load_explicit(&core->shut_down, memory_order_relaxed))
    return false;
  const config_t *config = config_of(core);
  size_t size = config_round(config, requested);
  try->size = size;
  if (!size || config_is_oversize(config, size))
    return false;
  if (stream->handle && RULE(CAPTURE_KEEPS_APART)) {
    if (is_captured(core, heap, stream->handle))
      return false;
    try->asked = true;
  }
  front_t *front = &heap->front;
  block_t *block = NULL;
  if (__builtin_expect(!gate_change(front, GATE_OPEN, GATE_HELD), 0) &&
      !gate_wait_wishing(front, size, requested, &block)) {
    if (block)
      *ptr = (void *)block->address;
    return block;
  }
  int slot, index;
  block = find(heap, size, &slot, &index);
  try->missed = !block;
  bool taken = block && ledger_take(heap->device, &front->ledger, block->segment->large,
                                    (amounts_t){1, (int64_t)size, (int64_t)requested});
  if (taken) {
    slots_take(front, slot, index);
    make_live(block, requested);
    *ptr = (void *)block->address;
  }
  gate_leave(front);
  return taken;
}

bool front_malloc(core_t *core, esper_stream as, size_t requested, front_try_t *try, void **ptr)
{
  front_try_t found = {0};
  if (serve(core, as, requested, &found, ptr))
    return true;
  *try = found; /* not before: who is served does not read it */
  return false;
}

bool front_free(block_t *block, uintptr_t address)
{
  segment_t *segment = block_segment_if_any(block);
  if (!segment)
    return false;
  heap_t *heap = segment_home(segment);
  front_t *front = &heap->front;
  if ((block->uses && RULE(FRONT_OWES_NOTHING)) || !block->plain || !gate_take(front, GATE_HELD))
    return false;
  /* Again, since whoever frees what is not theirs learns it here. */
  bool kept = block_state_of(block) == BLOCK_LIVE && block->address == address &&
              block->segment == segment && segment_home(segment) == heap &&
              slots_push(front, block);
  if (kept) {
    block_expect_neighbours(block);
    ledger_return(segment->device, &front->ledger, segment->large, amounts_of(block));
    block->counted_active = false;
    if (RULE(FRONT_STAMPS))
      block->stamp = stream_stamp(heap->stream);
    block_set_state(block, BLOCK_WARM);
  }
  gate_leave(front);
  return kept;
}

/* ---- under the device's lock ---------------------------------------------- */

void front_init(front_t *front)
{
  atomic_store_explicit(&front->gate, GATE_CLOSED, memory_order_relaxed);
  front->empty = true;
  front->epoch = 1;
}

/* What was found of its blocks holds no more. */
static void renew(front_t *front)
{
  if (++front->epoch >> 15)
    front->epoch = 1;
}

static void clear(front_t *front)
{
  front->empty = true;
  for (; front->filled; front->filled &= (uint16_t)(front->filled - 1)) {
    int slot = __builtin_ctz(front->filled);
    while (front->count[slot]) {
      block_t *block = front->block[slot][--front->count[slot]];
      block_set_state(block, BLOCK_CLAIMED);
      block->requested = 0;
      if (!front->locked) /* else it was seen when that was */
        block->segment->used_at = block->segment->device->large_requests;
      free_blocks_add_ready(block);
    }
  }
  renew(front);
}

void front_pass(block_t *block)
{
  front_t *front = &block->segment->heap->front;
  bool paused = front_pause(front);
  front->held = true;
  free_blocks_add(block);
  front->held = false;
  renew(front);
  if (paused)
    front_resume(front);
}

block_t *front_take_or_close(heap_t *heap, size_t size, size_t asked, bool missed)
{
  int slot, index;
  front_t *front = &heap->front;
  if (front->empty)
    return NULL;
  bool paused = front_pause(front);
  block_t *block = missed ? NULL : find(heap, size, &slot, &index);
  if (block) {
    slots_take(front, slot, index);
    make_live(block, asked);
    ledger_block_allocated(block);
    if (paused)
      front_resume(front);
  } else {
    front_shut(front);
    clear(front);
  }
  return block;
}

static bool keep(front_t *front, block_t *block)
{
  bool paused = front_pause(front);
  bool kept = slots_push(front, block);
  if (kept)
    block_set_state(block, BLOCK_WARM);
  if (paused)
    front_resume(front);
  return kept;
}

bool front_keep(block_t *block)
{
  heap_t *heap = block->segment->heap;
  front_t *front = &heap->front;
  if (!block->plain || !units_of(block->size))
    return false;
  front_open(heap);
  if (front->empty)
    return false;
  if (keep(front, block))
    return true;
  front_close(heap);
  front_open(heap);
  return keep(front, block);
}

bool front_claim_live(block_t *block, uintptr_t address)
{
  if (block_state_of(block) == BLOCK_GONE)
    return false;
  front_t *front = &block->segment->heap->front;
  bool paused = front_pause(front);
  bool live = block_state_of(block) == BLOCK_LIVE && block->address == address;
  if (live) {
    block_set_state(block, BLOCK_CLAIMED);
    ledger_free(block->segment->device, &front->ledger, block->segment->large, amounts_of(block));
  }
  if (paused)
    front_resume(front);
  return live;
}

void front_clear(heap_t *heap)
{
  front_shut(&heap->front);
  clear(&heap->front);
}

void fronts_close_pool(const device_t *device, const pool_t *pool)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    if (heap->pool == pool)
      front_close(heap);
}

void fronts_close(const device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    front_close(heap);
}

/* Whether every malloc and free counts, in its order: the threshold goes by how long
 * memory was not used. */
static bool wants_to_see_all(const device_t *device)
{
  return trace_is_wanted(device) ||
         config_of(device->core)->as_given.garbage_collection_threshold > 0;
}

void front_open(heap_t *heap)
{
  front_t *front = &heap->front;
  if (!front->empty || heap->capture || heap->pool != heap->device->default_pool)
    return;
  front->empty = false;
  front->locked = wants_to_see_all(heap->device);
  if (!front->locked)
    front_resume(front);
}

static void grant_wish(heap_t *heap)
{
  int slot, index;
  front_t *front = &heap->front;
  wish_t *wish = &front->wish;
  if (!front->stopped || !wish_look(wish))
    return;
  block_t *block = find(heap, wish->size, &slot, &index);
  if (block) {
    slots_take(front, slot, index);
    make_live(block, wish->requested);
    ledger_overdraw(&front->ledger, block->segment->large, amounts_of(block));
  }
  wish_answer(wish, block);
}

void fronts_grant_wishes(device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    grant_wish(heap);
}

uint64_t fronts_questions(device_t *device)
{
  uint64_t questions = 0;
  lock(&device->lock);
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    questions += atomic_load_explicit(&heap->front.questions, memory_order_relaxed);
  unlock(&device->lock);
  return questions;
}

bool front_is_valid(heap_t *heap)
{
  front_t *front = &heap->front;
  bool paused = front_pause(front), valid = front->epoch && !(front->epoch >> 15);
  valid &= !paused || wish_is_valid(&front->wish);
  size_t blocks = 0;
  for (unsigned slot = 0; slot < FRONT_SLOTS; slot++) {
    blocks += front->count[slot];
    valid &= front->count[slot] <= FRONT_DEPTH &&
             (front->filled >> slot & 1) == (front->count[slot] > 0);
    for (unsigned i = 0; i < front->count[slot] && valid; i++) {
      const block_t *b = front->block[slot][i];
      valid = b->state == BLOCK_WARM && !b->uses && !b->withheld && !b->counted_active &&
              b->segment->heap == heap && b->size == (size_t)front->units[slot] * BLOCK_ALIGN &&
              slot_of(front->units[slot]) >> 1 == slot >> 1;
      for (unsigned k = 0; k < i; k++)
        valid &= front->block[slot][k] != b;
    }
  }
  valid &= !front->empty || !(paused || blocks);
  if (paused)
    front_resume(front);
  return valid;
}
