#include "ledger.h"

#include "front.h"
#include "stats.h"

enum { FORGET_AFTER = 16 }; /* readings: then a size class counts as out of use */

/* ---- reading ------------------------------------------------------------- */

static void stat_apply(esper_stat *stat, int64_t taken, int64_t more)
{
  stat->current += more;
  stat->allocated += taken;
  stat->freed += taken - more;
}

static void read_class(esper_stats *s, int class, amounts_t taken, amounts_t active,
                       amounts_t allocated)
{
  stat_apply(&s->active[class], taken.count, active.count);
  stat_apply(&s->active_bytes[class], taken.bytes, active.bytes);
  stat_apply(&s->requested_bytes[class], taken.requested, active.requested);
  stat_apply(&s->allocation[class], taken.count, allocated.count);
  stat_apply(&s->allocated_bytes[class], taken.bytes, allocated.bytes);
}

static void note_use(ledger_t *ledger, int class, amounts_t taken)
{
  if (taken.count) {
    ledger->usual[class] =
        (amounts_t){1, taken.bytes / taken.count, taken.requested / taken.count};
    ledger->idle[class] = 0;
  } else if (ledger->idle[class]++ >= FORGET_AFTER) {
    ledger->usual[class] = (amounts_t){0};
  }
}

static bool is_untouched(const ledger_t *ledger, int large)
{
  int class = ESPER_SMALL + large;
  return !ledger->taken[large].count && !ledger->freed[large].count &&
         !ledger->satisfied[large].count &&
         ledger->granted[class].count == ledger->room[class].count;
}

static void ledger_read(ledger_t *ledger, esper_stats *stats)
{
  amounts_t all = {0};
  for (int large = 0; large < 2; large++) {
    int class = ESPER_SMALL + large;
    if (is_untouched(ledger, large)) {
      note_use(ledger, class, (amounts_t){0});
      continue;
    }
    amounts_t active = ledger->granted[class], allocated;
    amounts_sub(&active, ledger->room[class]);
    amounts_add(&active, ledger->paired[large]);
    allocated = active;
    amounts_sub(&active, ledger->satisfied[large]);
    amounts_sub(&allocated, ledger->freed[large]);
    read_class(stats, ESPER_ALL, ledger->taken[large], active, allocated);
    read_class(stats, class, ledger->taken[large], active, allocated);
    note_use(ledger, class, ledger->taken[large]);
    amounts_add(&all, ledger->taken[large]);
    ledger->taken[large] = ledger->freed[large] = ledger->satisfied[large] =
        ledger->paired[large] = (amounts_t){0};
  }
  note_use(ledger, ESPER_ALL, all);
  for (int class = 0; class < ESPER_CLASSES; class++)
    ledger->granted[class] = ledger->room[class] = (amounts_t){0};
}

void ledgers_read(device_t *device)
{
  for (const pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      ledger_read(&heap->front.ledger, &device->stats);
}

void ledgers_leave(heap_t *heap)
{
  ledger_read(&heap->front.ledger, &heap->pool->device->stats);
}

/* ---- room ---------------------------------------------------------------- */

static int64_t least(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

static void pair(ledger_t *ledger, bool large)
{
  const amounts_t *freed = &ledger->freed[large], *satisfied = &ledger->satisfied[large];
  amounts_t paired = {least(freed->count, satisfied->count),
                      least(freed->bytes, satisfied->bytes),
                      least(freed->requested, satisfied->requested)};
  amounts_t more = paired;
  amounts_sub(&more, ledger->paired[large]);
  ledger->paired[large] = paired;
  ledger_return(ledger, large, more);
}

void ledger_free(ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_add(&ledger->freed[large], amount);
  pair(ledger, large);
}

void ledger_satisfy(ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_add(&ledger->satisfied[large], amount);
  pair(ledger, large);
}

static int64_t room_below(const esper_stat *stat)
{
  return stat->peak - stat->current;
}

static amounts_t room_of_class(const esper_stats *s, int class)
{
  return (amounts_t){
      least(room_below(&s->active[class]), room_below(&s->allocation[class])),
      least(room_below(&s->active_bytes[class]), room_below(&s->allocated_bytes[class])),
      room_below(&s->requested_bytes[class])};
}

static void grant(amounts_t *left, ledger_t *ledger, int class, amounts_t amount)
{
  if (!amounts_cover(left, amount))
    return;
  amounts_sub(left, amount);
  amounts_add(&ledger->granted[class], amount);
  ledger->room[class] = ledger->granted[class];
}

/* First a block of the usual size for each that is in use, then equal shares. */
static void grant_class(device_t *device, int class, ledger_t *first, amounts_t wanted)
{
  amounts_t left = room_of_class(&device->stats, class);
  int64_t parts = 0;
  if (left.count < 1 || left.bytes < (int64_t)BLOCK_ALIGN)
    return;
  if (first)
    grant(&left, first, class, wanted);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next) {
      ledger_t *ledger = &heap->front.ledger;
      parts += ledger->usual[class].count;
      if (ledger != first && ledger->usual[class].count)
        grant(&left, ledger, class, ledger->usual[class]);
    }
  for (pool_t *pool = device->pools; pool && parts; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap && parts; heap = heap->next)
      if (heap->front.ledger.usual[class].count) {
        amounts_t share = {left.count / parts, left.bytes / parts, left.requested / parts};
        grant(&left, &heap->front.ledger, class, share);
        parts--;
      }
}

void ledgers_grant(device_t *device, const block_t *block)
{
  ledger_t *first = block ? ledger_of(block) : NULL;
  amounts_t wanted = block ? amounts_of(block) : (amounts_t){0};
  int other = block && block->segment->large ? ESPER_SMALL : ESPER_LARGE;
  if (first)
    first->usual[ESPER_ALL] = first->usual[ESPER_SMALL + block->segment->large] = wanted;
  for (int class = 0; class < ESPER_CLASSES; class++)
    grant_class(device, class, class == other ? NULL : first, wanted);
}

/* ---- counting the slow way ----------------------------------------------- */

/* The block's own front is closed, or paused by the caller. */
static void allocate_past_room(device_t *device, block_t *block)
{
  fronts_pause(device);
  ledger_overdraw(ledger_of(block), block->segment->large, amounts_of(block));
  ledgers_read(device);
  stats_raise_peaks(&device->stats);
  ledgers_grant(device, block);
  fronts_resume(device);
}

void ledger_block_allocated(block_t *block)
{
  device_t *device = block->segment->device;
  front_t *front = &block->segment->heap->front;
  bool paused = front_pause(front);
  if (!ledger_take(&front->ledger, block->segment->large, amounts_of(block)))
    allocate_past_room(device, block);
  if (block->oversize)
    stat_add(&device->stats.oversize_allocations, 1);
  if (paused)
    front_resume(front);
}

void ledger_block_satisfied(const block_t *block)
{
  front_t *front = &block->segment->heap->front;
  bool paused = front_pause(front);
  ledger_satisfy(&front->ledger, block->segment->large, amounts_of(block));
  if (paused)
    front_resume(front);
}

/* ---- checking ------------------------------------------------------------ */

bool ledgers_are_valid(device_t *device)
{
  bool valid = true;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    amounts_t granted = {0}, room = room_of_class(&device->stats, class);
    for (const pool_t *pool = device->pools; pool; pool = pool->next)
      for (const heap_t *heap = pool->heaps; heap; heap = heap->next) {
        amounts_add(&granted, heap->front.ledger.granted[class]);
        valid &= amounts_cover(&heap->front.ledger.room[class], (amounts_t){0});
      }
    valid &= amounts_cover(&room, granted);
  }
  return valid;
}
