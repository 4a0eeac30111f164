#include "pool.h"

#include <stdlib.h>
#include <string.h>

#include "../stats/pool_stats.h"
#include "../base/call.h"
#include "../order/capture.h"
#include "../base/config.h"
#include "../api/core.h"
#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "../blocks/block_cache.h"
#include "../requests/heap.h"
#include "../stats/stat_shard.h"
#include "routing.h"
#include "../requests/quiesce.h"
#include "../requests/drain.h"
#include "source.h"
#include "../order/stream.h"

/* ---- pools ------------------------------------------------------------- */

void pool_init(pool_t *pool, device_t *device, uint64_t id_first, uint64_t id_second)
{
  *pool = (pool_t){.device = device,
                   .id = {id_first, id_second},
                   .references = 1,
                   .next = device->pools};
  device->pools = pool;
}

pool_t *pool_find(device_t *device, uint64_t id_first, uint64_t id_second)
{
  pool_t *pool = device->pools;
  while (pool && (pool->id[0] != id_first || pool->id[1] != id_second))
    pool = pool->next;
  return pool;
}

static pool_t *make_pool(device_t *device, uint64_t id_first, uint64_t id_second)
{
  pool_t *pool = malloc(sizeof *pool);
  account_t *account = pool ? account_open(device, id_first, id_second) : NULL;
  if (!account) {
    free(pool);
    return NULL;
  }
  pool_init(pool, device, id_first, id_second);
  pool->account = account;
  return pool;
}

pool_t *pool_refer(device_t *device, uint64_t id_first, uint64_t id_second)
{
  pool_t *pool = pool_find(device, id_first, id_second);
  if (pool)
    pool->references++;
  else
    pool = make_pool(device, id_first, id_second);
  return pool;
}

void pool_let_go(pool_t *pool)
{
  if (--pool->references == 0)
    pool_note_work(pool);
  pool_collect(pool->device);
}

void pool_enter(pool_t *pool)
{
  pool->busy++;
}

void pool_leave(pool_t *pool)
{
  pool->busy--;
}

/* A graph that was just destroyed may still be running, on any stream. */
void pool_note_work(pool_t *pool)
{
  stream_t *all = pool->device->all_streams;
  pool->released = stream_stamp(all);
  atomic_store(&all->holds, true);
}

bool pool_has_memory(const pool_t *pool)
{
  for (const segment_t *s = pool->device->first_segment; s; s = s->next)
    if (s->heap->pool == pool)
      return true;
  return false;
}

/* In one walk, or many pools that wait for their memory would cost as many. */
static void find_idle(device_t *device)
{
  bool any = false;
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    any |= pool->idle = !pool->references && !pool->busy && !pool->open;
  for (const segment_t *s = any ? device->first_segment : NULL; s; s = s->next)
    s->heap->pool->idle = false;
}

void pool_collect(device_t *device)
{
  find_idle(device);
  for (pool_t **link = &device->pools; *link;) {
    pool_t *pool = *link;
    if (!pool->idle) {
      link = &pool->next;
    } else {
      *link = pool->next;
      pool_destroy_heaps(pool);
      account_close(device, pool->account);
      pool->next = device->gone_pools;
      device->gone_pools = pool;
    }
  }
}

void pool_bury(device_t *device)
{
  lock(&device->lock);
  pool_t *pool = device->gone_pools;
  device->gone_pools = NULL;
  unlock(&device->lock);
  for (pool_t *next; pool; pool = next) {
    next = pool->next;
    source_drop(pool);
    free(pool);
  }
}

/* A private pool keeps its memory while anybody refers to it, as with PyTorch's own
 * allocator: graphs touch it, a tree's even what none of them was handed, and networks
 * know its addresses. */
bool pool_may_give_back(const segment_t *segment)
{
  const pool_t *pool = segment->heap->pool;
  if (pool->open)
    return false;
  if (!pool->references)
    return stream_completed(pool->device->all_streams, pool->released) ||
           !RULE(RELEASE_NEEDS_COMPLETION);
  if (pool != &pool->device->default_pool && RULE(GRAPHS_KEEP_MEMORY))
    return false;
  return !segment->captured && !segment->heap->capture;
}

/* ---- heaps ------------------------------------------------------------- */

_Static_assert(offsetof(heap_t, front.gate) == 0, "heap_take leaves the gate alone");

/* Who frees what has got another home meanwhile, or frees twice, may still try the gate
 * of a spare heap: it stays closed. */
static heap_t *heap_take(device_t *device)
{
  heap_t *heap = device->spare_heaps;
  if (!heap)
    return host_take(sizeof *heap);
  device->spare_heaps = heap->next;
  memset((char *)heap + sizeof heap->front.gate, 0, sizeof *heap - sizeof heap->front.gate);
  return heap;
}

heap_t *pool_heap(pool_t *pool, stream_t *stream, uint64_t capture)
{
  heap_t *sealed = NULL;
  for (heap_t *heap = pool->heaps; heap; heap = heap->next) {
    if (heap->stream != stream)
      continue;
    if (heap->capture == capture) {
      if (heap->sealed && !pool_has_graphs(pool))
        free_blocks_withhold_none(heap);
      heap->sealed = false;
      return heap;
    }
    if (heap->sealed)
      sealed = heap;
  }
  if (sealed) {
    sealed->capture = capture;
    sealed->sealed = false;
    return sealed;
  }
  heap_t *heap = heap_take(pool->device);
  if (!heap)
    return NULL;
  front_init(&heap->front);
  heap->pool = pool;
  heap->stream = stream;
  heap->capture = capture;
  heap->ready[0].placed = heap->ready[1].placed = true;
  heap->next = pool->heaps;
  pool->heaps = heap;
  atomic_store_explicit(&stream->kept, true, memory_order_release);
  if (pool == &pool->device->default_pool && !capture) {
    heap->front.ledger.number = atomic_fetch_add(&pool->device->ledgers, 1);
    atomic_store_explicit(&stream->heap, heap, memory_order_release);
  }
  return heap;
}

bool pool_repeats(const heap_t *heap)
{
  const device_t *device = heap->pool->device;
  return heap->pool != &device->default_pool && !heap->capture &&
         config_of(device->core)->as_given.reuse_order == ESPER_REUSE_GATE;
}

void pool_heap_leave_capture(heap_t *heap)
{
  heap->capture = 0;
  if (heap->branch)
    branch_drop(heap->branch);
  heap->branch = NULL;
}

void pool_destroy_heap(heap_t *heap)
{
  pool_heap_leave_capture(heap);
  heap_t **link = &heap->pool->heaps;
  while (*link != heap)
    link = &(*link)->next;
  *link = heap->next;
  device_t *device = heap->pool->device;
  core_assert(heap->front.empty); /* its gate is closed, and stays so */
  ledgers_leave(heap);
  device->core->driver_calls[CALL_stream_capture] += atomic_load(&heap->front.questions);
  heap->next = device->spare_heaps;
  device->spare_heaps = heap;
}

void pool_destroy_heaps(pool_t *pool)
{
  while (pool->heaps)
    pool_destroy_heap(pool->heaps);
}

/* ---- checking ---------------------------------------------------------- */

bool pool_is_valid(const pool_t *pool)
{
  bool valid = pool->references >= 0 && pool->busy >= 0;
  for (const heap_t *heap = pool->heaps; heap && valid; heap = heap->next) {
    valid = heap->pool == pool && heap_is_valid(heap) && !(heap->sealed && heap->capture);
    for (const heap_t *other = heap->next; other && valid; other = other->next)
      valid = heap->stream != other->stream || heap->capture != other->capture;
  }
  return valid;
}

bool heap_is_valid(const heap_t *heap)
{
  size_t pending = 0, barred[2] = {0};
  for (const block_t *b = heap->oldest_pending; b; b = b->newer) {
    if (b->state != BLOCK_PENDING || b->segment->heap != heap ||
        (b->newer ? b->newer->older != b : heap->newest_pending != b))
      return false;
    pending++;
    barred[b->segment->large] += b->barred;
  }
  return barred[0] == heap->waits.barred[0] && barred[1] == heap->waits.barred[1] &&
         pending == heap->pending[0].count + heap->pending[1].count &&
         bins_is_valid(&heap->ready[0]) && bins_is_valid(&heap->ready[1]) &&
         bins_is_valid(&heap->pending[0]) && bins_is_valid(&heap->pending[1]);
}

/* ---- the public interface ----------------------------------------------- */

static esper_status no_pool(device_t *device, uint64_t first, uint64_t second)
{
  return error_set(ESPER_INVALID, "device %d has no pool (%llu, %llu)", device->index,
                   (unsigned long long)first, (unsigned long long)second);
}

static esper_status no_host_memory(void)
{
  return error_set(ESPER_HOST_MEMORY, "no host memory for a pool");
}

static esper_status private_pool_device(core_t *core, int index, uint64_t first, uint64_t second,
                                        device_t **device)
{
  if (!first && !second)
    return error_set(ESPER_INVALID, "pool (0, 0) is the default pool, which is always there");
  return core_device(core, index, device);
}

esper_status esper_pool_create(esper_core *core, int index, uint64_t first, uint64_t second,
                               esper_pool **pool)
{
  device_t *device;
  *pool = NULL;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  bool created = !pool_find(device, first, second);
  *pool = pool_refer(device, first, second);
  if (*pool && created) /* growth reads it without the lock */
    (*pool)->created = true;
  unlock(&device->lock);
  return *pool ? ESPER_OK : no_host_memory();
}

esper_status esper_pool_begin(esper_core *core, int index, uint64_t first, uint64_t second,
                              esper_pool_filter *filter, void *context)
{
  device_t *device;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  opening_t *opening;
  status = opening_make(filter, context, &opening);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  bool open = pool && pool->open;
  bool full = !opening_has_room(device);
  if (!open && !full && (pool = pool_refer(device, first, second))) {
    pool->open = true;
    opening_reserve(device);
  }
  unlock(&device->lock);
  if (open || full || !pool) {
    opening_discard(opening);
    return open   ? error_set(ESPER_INVALID,
                              "allocations go to pool (%llu, %llu) of device %d already: end "
                              "that first",
                              (unsigned long long)first, (unsigned long long)second, index)
           : full ? error_set(ESPER_INVALID,
                              "allocations go to %d pools of device %d at once "
                              "already: end one first",
                              OPENINGS, index)
                  : no_host_memory();
  }
  seal_pool(pool);
  lock(&device->lock);
  opening_add(device, pool, opening);
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_pool_end(esper_core *core, int index, uint64_t first, uint64_t second,
                            void **context)
{
  device_t *device;
  if (context)
    *context = NULL;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  opening_t *opening = pool ? opening_remove(device, pool) : NULL;
  unlock(&device->lock);
  if (!opening)
    return error_set(ESPER_INVALID,
                     "allocations do not go to pool (%llu, %llu) of device %d: it was not begun, "
                     "or has been ended",
                     (unsigned long long)first, (unsigned long long)second, index);
  opening_wait(opening);
  if (context)
    *context = opening->context;
  opening_discard(opening);
  lock(&device->lock);
  pool->open = false;
  pool_collect(device);
  unlock(&device->lock);
  pool_bury(device);
  return ESPER_OK;
}

esper_status esper_pool_release(esper_core *core, int index, uint64_t first, uint64_t second)
{
  device_t *device;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  if (pool && pool->references)
    pool_let_go(pool);
  else
    status = no_pool(device, first, second);
  unlock(&device->lock);
  pool_bury(device);
  return status;
}

int esper_pool_use_count(esper_core *core, int index, uint64_t first, uint64_t second)
{
  if (index < 0 || index >= core->device_count)
    return 0;
  device_t *device = &core->devices[index];
  lock(&device->lock);
  /* The default pool is nobody's: who asks for references means a private one. */
  const pool_t *pool = first || second ? pool_find(device, first, second) : NULL;
  int references = pool ? pool->references : 0;
  unlock(&device->lock);
  return references;
}

esper_status esper_pool_empty(esper_core *core, int index, uint64_t first, uint64_t second)
{
  device_t *device;
  esper_status status = core_used_device(core, index, &device);
  if (!device)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  if (pool)
    pool_enter(pool);
  unlock(&device->lock);
  if (!pool)
    return ESPER_OK;
  status = esper_empty_cache(core, index, pool);
  lock(&device->lock);
  pool_leave(pool);
  pool_collect(device);
  unlock(&device->lock);
  pool_bury(device);
  return status;
}
