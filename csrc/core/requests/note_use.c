#include "note_use.h"

#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/cache_latch.h"
#include "../blocks/find.h"
#include "../blocks/map.h"
#include "../blocks/use.h"
#include "../memory/page_table.h"
#include "../memory/peers.h"
#include "../order/capture_thread.h"
#include "../order/capturing.h"
#include "drain.h"
#include "record_use.h"

/* An observer notes the inputs of every operator, so almost every note says nothing new: the block
 * is the stream's own, or the same note was made before. Both can be seen without a lock. Only the
 * caller may free the block, so it stays what it is meanwhile. */

enum { NOTED_STREAMS = 32 }; /* streams from this index on have no bit in block->noted */

static uint32_t noted_bit(const stream_t *stream)
{
  return stream->index < NOTED_STREAMS ? 1u << stream->index : 0;
}

/* Whether the stream's use lasts until the free already. */
static bool is_noted(const block_t *block, const stream_t *stream)
{
  return block_is_of(block, stream) ||
         __atomic_load_n(&block->noted, __ATOMIC_RELAXED) & noted_bit(stream);
}

static esper_status note_on(block_t *block, stream_t *stream)
{
  if (is_noted(block, stream))
    return ESPER_OK;
  esper_status status = mark_attach(block, stream, NULL, USE_AT_FREE);
  if (status == ESPER_OK)
    __atomic_store_n(&block->noted, block->noted | noted_bit(stream), __ATOMIC_RELAXED);
  return status;
}

/* A graph that reads memory from outside may be replayed on any stream, so its use is on all of
 * them, even if the memory is the capturing stream's own. Memory of an earlier graph on the same
 * stream needs nothing: such graphs are replayed in order. */
static esper_status note_inside(block_t *block, presented_t p)
{
  bool own = block_is_of(block, p.stream);
  if (p.capture != block->capture && (!own || !block->capture) && RULE(GRAPH_READS_ANYWHERE))
    return mark_on_all_streams(block, USE_AT_FREE);
  return own ? ESPER_OK : mark_attach(block, p.stream, NULL, USE_AT_FREE);
}

__attribute__((noinline)) static esper_status note_slowly(core_t *core, const void *ptr,
                                                          esper_stream as)
{
  presented_t p;
  esper_status status = mark_present(core, as, &p);
  if (status != ESPER_OK)
    return status;
  p.capture = stream_capture_of(p, false);
  p.asked = true;
  if (p.capture && p.capture != ESPER_CAPTURE_INVALID)
    capture_thread_note(p.capture, p.stream);
  /* A stream that may be destroyed is often seen by no other call. */
  if (!p.capture && atomic_load_explicit(&p.stream->holds, memory_order_relaxed))
    held_uses_record(core, p);
  block_t *block = find_lock_live(core, ptr);
  if (!block)
    return ESPER_OK;
  device_t *device = block->segment->device;
  if (pages_sleep_under(block)) {
    unlock(&device->lock);
    return error_set(ESPER_ASLEEP, "memory at %p is used while it sleeps: wake it first", ptr);
  }
  status = p.capture ? note_inside(block, p) : note_on(block, p.stream);
  unlock(&device->lock);
  return status;
}

/* A capture may begin on one device and go on on another. */
static bool may_be_captured(core_t *core, stream_t *stream, void *handle)
{
  return atomic_load_explicit(&core->captures_likely, memory_order_relaxed) &&
         stream_capture_of(stream_presented(stream, handle), false);
}

/* Memory of other tags than those that sleep has segments of its own, which are known to be
 * awake. */
static bool may_sleep(const core_t *core, const block_t *block)
{
  return atomic_load_explicit(&core->asleep, memory_order_relaxed) &&
         __atomic_load_n(&block->segment->asleep, __ATOMIC_RELAXED);
}

/* Whether a note says nothing new. `stream` NULL: nobody knows. */
static inline bool says_nothing(core_t *core, const void *ptr, const stream_t *stream)
{
  const block_t *block = stream && ptr ? map_find(core->map, (uintptr_t)ptr) : NULL;
  return block ? is_noted(block, stream) && !may_sleep(core, block) : !ptr;
}

esper_status note_uses(core_t *core, const void *const *ptrs, size_t count, esper_stream as)
{
  const device_t *device = &core->devices[as.device];
  stream_t *stream = stream_immortal(core, device, as.handle);
  if (stream && may_be_captured(core, stream, as.handle))
    stream = NULL;
  esper_status status = ESPER_OK;
  for (size_t i = 0; i < count; i++) {
    esper_status one =
        says_nothing(core, ptrs[i], stream) ? ESPER_OK : note_slowly(core, ptrs[i], as);
    status = status == ESPER_OK ? one : status;
  }
  return status;
}

/* The caches are paused, so that what becomes live later does so in threads that see what the
 * caller did before. */
static esper_status note_live_blocks(device_t *device)
{
  esper_status status = ESPER_OK;
  lock(&device->lock);
  caches_pause(device);
  for (segment_t *segment = device->first_segment; segment; segment = segment->next)
    for (block_t *block = segment->first; block && status == ESPER_OK; block = block->next)
      if (block_state_of(block) == BLOCK_LIVE && RULE(UNSEEN_USES_COUNT))
        status = mark_on_all_streams(block, USE_AT_FREE);
  caches_resume(device);
  unlock(&device->lock);
  return status;
}

esper_status note_unseen_uses(core_t *core)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++)
    if (atomic_load(&core->devices[i].ready))
      status = peers_start(&core->devices[i]);
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++)
    if (atomic_load(&core->devices[i].ready))
      status = note_live_blocks(&core->devices[i]);
  return status;
}
