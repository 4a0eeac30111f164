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
  for (int class = 0; class < ESPER_CLASSES; class++)
    device->purse.left[class] = (amounts_t){0};
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

static void pair(device_t *device, ledger_t *ledger, bool large)
{
  const amounts_t *freed = &ledger->freed[large], *satisfied = &ledger->satisfied[large];
  amounts_t paired = {least(freed->count, satisfied->count),
                      least(freed->bytes, satisfied->bytes),
                      least(freed->requested, satisfied->requested)};
  amounts_t more = paired;
  amounts_sub(&more, ledger->paired[large]);
  ledger->paired[large] = paired;
  ledger_return(device, ledger, large, more);
}

void ledger_free(device_t *device, ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_add(&ledger->freed[large], amount);
  pair(device, ledger, large);
}

void ledger_satisfy(device_t *device, ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_add(&ledger->satisfied[large], amount);
  pair(device, ledger, large);
}

/* The less is left close to a peak, the less a ledger takes and keeps. With none at all a
 * thread that frees what it allocated would go to the purse each time. */
static void adapt(const purse_t *purse, ledger_t *ledger, amounts_t amount)
{
  enum { MOST = 16 }; /* blocks */
  const amounts_t *left = &purse->left[ESPER_ALL];
  int64_t blocks = amount.bytes ? least(left->count, left->bytes / amount.bytes) : left->count;
  int64_t share = blocks / (2 * purse->ledgers + 1);
  ledger->keeps = share < 1 ? 1 : least(share, MOST);
  ledger->much = ledger->keeps > 1 ? 2 * ledger->keeps : 1;
}

/* Of one figure: from the purse into a room that is too small, some blocks' worth but no
 * more than the others may want. */
static bool draw(int64_t *left, int64_t *granted, int64_t *room, int64_t amount,
                 int64_t blocks)
{
  int64_t more = amount * blocks;
  if (*room >= amount)
    return true;
  if (more > *left / 2)
    more = *left / 2;
  if (more < amount - *room)
    more = amount - *room;
  if (more > *left)
    return false;
  *left -= more;
  *granted += more;
  *room += more;
  return true;
}

static bool draw_class(purse_t *purse, ledger_t *ledger, int class, amounts_t amount)
{
  amounts_t *left = &purse->left[class], *granted = &ledger->granted[class];
  amounts_t *room = &ledger->room[class];
  int64_t n = ledger->keeps;
  return draw(&left->count, &granted->count, &room->count, amount.count, n) &&
         draw(&left->bytes, &granted->bytes, &room->bytes, amount.bytes, n) &&
         draw(&left->requested, &granted->requested, &room->requested, amount.requested, n);
}

__attribute__((noinline)) bool ledger_draw(device_t *device, ledger_t *ledger, bool large,
                                           amounts_t amount)
{
  purse_t *purse = &device->purse;
  lock(&purse->lock);
  adapt(purse, ledger, amount);
  bool drawn = draw_class(purse, ledger, ESPER_ALL, amount) &&
               draw_class(purse, ledger, ESPER_SMALL + large, amount);
  unlock(&purse->lock);
  return drawn;
}

static void share(int64_t *left, int64_t *granted, int64_t *room, int64_t kept)
{
  int64_t less = *room - kept;
  if (less <= 0)
    return;
  *left += less;
  *granted -= less;
  *room -= less;
}

static void share_class(purse_t *purse, ledger_t *ledger, int class, amounts_t amount)
{
  amounts_t *left = &purse->left[class], *granted = &ledger->granted[class];
  amounts_t *room = &ledger->room[class];
  int64_t n = ledger->keeps;
  share(&left->count, &granted->count, &room->count, amount.count * n);
  share(&left->bytes, &granted->bytes, &room->bytes, amount.bytes * n);
  share(&left->requested, &granted->requested, &room->requested, amount.requested * n);
}

__attribute__((noinline)) void ledger_share(device_t *device, ledger_t *ledger, bool large,
                                            amounts_t amount)
{
  purse_t *purse = &device->purse;
  lock(&purse->lock);
  adapt(purse, ledger, amount);
  share_class(purse, ledger, ESPER_ALL, amount);
  share_class(purse, ledger, ESPER_SMALL + large, amount);
  unlock(&purse->lock);
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

/* A block of the usual size for each that is in use. */
static void grant_class(device_t *device, int class, ledger_t *first, amounts_t wanted)
{
  amounts_t left = room_of_class(&device->stats, class);
  if (left.count < 1 || left.bytes < (int64_t)BLOCK_ALIGN)
    return;
  if (first)
    grant(&left, first, class, wanted);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next) {
      ledger_t *ledger = &heap->front.ledger;
      if (ledger != first && ledger->usual[class].count)
        grant(&left, ledger, class, ledger->usual[class]);
    }
  device->purse.left[class] = left;
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
  device->purse.ledgers = 0;
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      device->purse.ledgers += heap->front.ledger.usual[ESPER_ALL].count;
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
  if (!ledger_take(device, &front->ledger, block->segment->large, amounts_of(block)))
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
  ledger_satisfy(block->segment->device, &front->ledger, block->segment->large,
                 amounts_of(block));
  if (paused)
    front_resume(front);
}

/* ---- checking ------------------------------------------------------------ */

bool ledgers_are_valid(device_t *device)
{
  bool valid = true;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    amounts_t granted = device->purse.left[class], room = room_of_class(&device->stats, class);
    valid &= amounts_cover(&granted, (amounts_t){0});
    for (const pool_t *pool = device->pools; pool; pool = pool->next)
      for (const heap_t *heap = pool->heaps; heap; heap = heap->next) {
        amounts_add(&granted, heap->front.ledger.granted[class]);
        valid &= amounts_cover(&heap->front.ledger.room[class], (amounts_t){0});
      }
    valid &= amounts_cover(&room, granted);
  }
  return valid;
}
