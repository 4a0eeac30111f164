#include "stat_shard.h"

#include <string.h>

#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "stat.h"
#include "stats.h"

/* ---- purses ------------------------------------------------------------- */

static unsigned purses_in_use(const device_t *device)
{
  unsigned ledgers = atomic_load_explicit(&device->ledgers, memory_order_relaxed);
  return ledgers < PURSES ? ledgers + !ledgers : PURSES;
}

static void note_what_is_left(purse_t *purse)
{
  bool empty = true;
  for (int class = 0; class < ESPER_CLASSES; class++)
    empty &= amounts_are_zero(purse->left[class]);
  atomic_store_explicit(&purse->empty, empty, memory_order_relaxed);
}

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

static bool is_untouched(const ledger_t *ledger, int large)
{
  int class = ESPER_SMALL + large;
  return !ledger->taken[large].count && !ledger->freed[large].count &&
         !ledger->satisfied[large].count &&
         ledger->granted[class].count == ledger->room[class].count;
}

static void ledger_read(ledger_t *ledger, esper_stats *stats)
{
  for (int large = 0; large < 2; large++) {
    int class = ESPER_SMALL + large;
    if (is_untouched(ledger, large))
      continue;
    amounts_t active = ledger->granted[class], allocated;
    amounts_sub(&active, ledger->room[class]);
    amounts_add(&active, ledger->paired[large]);
    allocated = active;
    amounts_sub(&active, ledger->satisfied[large]);
    amounts_sub(&allocated, ledger->freed[large]);
    read_class(stats, ESPER_ALL, ledger->taken[large], active, allocated);
    read_class(stats, class, ledger->taken[large], active, allocated);
    ledger->taken[large] = ledger->freed[large] = ledger->satisfied[large] = ledger->paired[large] =
        (amounts_t){0};
  }
  for (int class = 0; class < ESPER_CLASSES; class++)
    ledger->granted[class] = ledger->room[class] = (amounts_t){0};
  ledger->keeps = ledger->much = 0;
}

void ledgers_read(device_t *device)
{
  for (unsigned i = 0, n = purses_in_use(device); i < n; i++) {
    memset(device->purses[i].left, 0, sizeof device->purses[i].left);
    atomic_store_explicit(&device->purses[i].empty, true, memory_order_relaxed);
  }
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    ledger_read(&heap->front.ledger, &device->stats);
}

void ledgers_leave(heap_t *heap)
{
  ledger_read(&heap->front.ledger, &heap->device->stats);
}

/* ---- room ---------------------------------------------------------------- */

static int64_t least(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

static void pair(device_t *device, ledger_t *ledger, bool large)
{
  const amounts_t *freed = &ledger->freed[large], *satisfied = &ledger->satisfied[large];
  amounts_t paired = {least(freed->count, satisfied->count), least(freed->bytes, satisfied->bytes),
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
 * thread that frees what it allocated would go to a purse each time; but where what one
 * kept made another stop everybody a moment ago, nobody keeps the last. */
static void adapt(purse_t *purse, ledger_t *ledger, amounts_t amount)
{
  enum { MOST = 16, PART = 4, FRUGAL_PART = 32 }; /* blocks; of what is left */
  const amounts_t *left = &purse->left[ESPER_ALL];
  int64_t blocks = amount.bytes ? least(left->count, left->bytes / amount.bytes) : left->count;
  bool frugal = purse->frugal > 0;
  purse->frugal -= frugal;
  int64_t keeps = least(blocks / (frugal ? FRUGAL_PART : PART), MOST);
  ledger->keeps = keeps || frugal ? keeps : 1;
  ledger->much = keeps > 1 ? 2 * keeps : ledger->keeps;
}

/* Of one figure: from the purse into a room that is too small, some blocks' worth but no
 * more than the others may want. False: that is still too small. */
static bool draw(int64_t *left, int64_t *granted, int64_t *room, int64_t amount, int64_t blocks)
{
  int64_t more = amount * blocks;
  if (*room >= amount)
    return true;
  if (more > *left / 2)
    more = *left / 2;
  if (more < amount - *room)
    more = least(amount - *room, *left);
  *left -= more;
  *granted += more;
  *room += more;
  return *room >= amount;
}

static bool draw_class(purse_t *purse, ledger_t *ledger, int class, amounts_t amount)
{
  amounts_t *left = &purse->left[class], *granted = &ledger->granted[class];
  amounts_t *room = &ledger->room[class];
  int64_t n = ledger->keeps;
  bool count = draw(&left->count, &granted->count, &room->count, amount.count, n);
  bool bytes = draw(&left->bytes, &granted->bytes, &room->bytes, amount.bytes, n);
  return draw(&left->requested, &granted->requested, &room->requested, amount.requested, n) &&
         count && bytes;
}

__attribute__((noinline)) bool ledger_draw(device_t *device, ledger_t *ledger, bool large,
                                           amounts_t amount)
{
  bool drawn = false;
  unsigned purses = purses_in_use(device);
  for (unsigned i = 0; i < purses && !drawn; i++) {
    purse_t *purse = &device->purses[(ledger->number + i) % purses];
    if (atomic_load_explicit(&purse->empty, memory_order_relaxed))
      continue;
    latch_take(&purse->latch);
    adapt(purse, ledger, amount);
    drawn = draw_class(purse, ledger, ESPER_ALL, amount);
    drawn = draw_class(purse, ledger, ESPER_SMALL + large, amount) && drawn;
    note_what_is_left(purse);
    latch_leave(&purse->latch);
  }
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
  purse_t *purse = &device->purses[ledger->number % purses_in_use(device)];
  latch_take(&purse->latch);
  adapt(purse, ledger, amount);
  share_class(purse, ledger, ESPER_ALL, amount);
  share_class(purse, ledger, ESPER_SMALL + large, amount);
  note_what_is_left(purse);
  latch_leave(&purse->latch);
}

static int64_t room_below(const esper_stat *stat)
{
  return stat->peak - stat->current;
}

static amounts_t room_of_class(const esper_stats *s, int class)
{
  return (
      amounts_t){least(room_below(&s->active[class]), room_below(&s->allocation[class])),
                 least(room_below(&s->active_bytes[class]), room_below(&s->allocated_bytes[class])),
                 room_below(&s->requested_bytes[class])};
}

/* In equal parts. Whether there is anything. */
static bool fill_purses(device_t *device, int class, amounts_t left)
{
  bool any = !amounts_are_zero(left);
  for (int i = 0, parts = any ? (int)purses_in_use(device) : 0; parts > 0; i++, parts--) {
    amounts_t part = {left.count / parts, left.bytes / parts, left.requested / parts};
    amounts_sub(&left, part);
    device->purses[i].left[class] = part;
  }
  return any;
}

void ledgers_grant(device_t *device, const block_t *block)
{
  bool any = false;
  int other = block && block->segment->large ? ESPER_SMALL : ESPER_LARGE;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    amounts_t left = room_of_class(&device->stats, class);
    if (block && class != other && amounts_cover(&left, amounts_of(block))) {
      ledger_t *first = ledger_of(block);
      first->granted[class] = first->room[class] = amounts_of(block);
      amounts_sub(&left, amounts_of(block));
    }
    any |= fill_purses(device, class, left);
  }
  for (unsigned i = 0, n = any ? purses_in_use(device) : 0; i < n; i++)
    note_what_is_left(&device->purses[i]);
}

/* ---- counting the slow way ----------------------------------------------- */

enum { FRUGAL = 1024 }; /* visits to a purse */

/* The block's own front is closed, or paused by the caller. */
static void allocate_past_room(device_t *device, block_t *block)
{
  fronts_pause(device);
  fronts_grant_wishes(device);
  ledger_overdraw(ledger_of(block), block->segment->large, amounts_of(block));
  ledgers_read(device);
  bool rose = stats_raise_peaks(&device->stats);
  ledgers_grant(device, block);
  if (!rose) /* there was room, and others kept it */
    for (int i = 0; i < PURSES; i++)
      device->purses[i].frugal = FRUGAL;
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
  ledger_satisfy(block->segment->device, &front->ledger, block->segment->large, amounts_of(block));
  if (paused)
    front_resume(front);
}

/* ---- checking ------------------------------------------------------------ */

bool ledgers_are_valid(device_t *device)
{
  bool valid = true;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    amounts_t granted = {0}, room = room_of_class(&device->stats, class);
    for (int i = 0; i < PURSES; i++) {
      amounts_add(&granted, device->purses[i].left[class]);
      valid &= amounts_cover(&device->purses[i].left[class], (amounts_t){0});
    }
    for (const heap_t *heap = device->heaps; heap; heap = heap->next_on_device) {
      amounts_add(&granted, heap->front.ledger.granted[class]);
      valid &= amounts_cover(&heap->front.ledger.room[class], (amounts_t){0});
    }
    valid &= amounts_cover(&room, granted);
  }
  return valid;
}
