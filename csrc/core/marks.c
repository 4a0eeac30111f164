#include "marks.h"

#include "call.h"
#include "error.h"
#include "map.h"
#include "stream.h"
#include "use.h"

enum { MARKS_PER_RETIREMENT = 32 };

static device_t *device_of(const block_t *block)
{
  return block->segment->heap->pool->device;
}

static block_t *block_around(segment_t *segment, uintptr_t address)
{
  block_t *block = segment->first;
  while (block && block->address + block->size <= address)
    block = block->next;
  return block;
}

block_t *marks_lock_block(core_t *core, const void *ptr)
{
  uintptr_t address = (uintptr_t)ptr;
  block_t *block = map_find(core->map, address);
  segment_t *segment = block ? block->segment : map_find_segment(core->map, address);
  if (!segment)
    return NULL;
  device_t *device = segment->heap->pool->device;
  lock(&device->lock);
  if (!block)
    block = block_around(segment, address);
  if (block && block->state == BLOCK_LIVE)
    return block;
  unlock(&device->lock);
  return NULL;
}

/* One attached use. */
static esper_status attach(block_t *block, stream_t *stream, record_t *record, unsigned flags)
{
  device_t *device = device_of(block);
  uses_drop_completed(device, block);
  use_t *use = use_take(device);
  if (!use)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a use");
  use_attach(block, stream, record, flags, &use);
  if (use)
    use_give(device, use);
  return ESPER_OK;
}

/* Whether `stream` must be a use of the block: its own stream need not. */
static bool needs_use(const block_t *block, const stream_t *stream)
{
  if (!RULE(MARK_FROM_ANY_DEVICE) && stream->device != device_of(block))
    return false;
  return block->user != stream;
}

/* Only a core without rule 7c loses marks while somebody captures. */
static bool is_lost(core_t *core, int device)
{
  bool captured = false;
  if (!RULE(MARK_DESPITE_CAPTURES))
    for (stream_t *s = atomic_load(&core->streams); s; s = s->next)
      captured |= s->device == &core->devices[device] && s->immortal && !s->all_streams &&
                  stream_capture_of((presented_t){s, s->handle}, true);
  return captured;
}

static bool any_needs_use(core_t *core, const void *const *ptrs, size_t count,
                          const stream_t *stream, size_t *found)
{
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    block_t *block = marks_lock_block(core, ptrs[i]);
    if (!block)
      continue;
    ++*found;
    any |= needs_use(block, stream);
    unlock(&device_of(block)->lock);
  }
  return any;
}

static esper_status attach_all(core_t *core, const void *const *ptrs, size_t count,
                               stream_t *stream, record_t *record, unsigned flags)
{
  esper_status status = ESPER_OK;
  for (size_t i = 0; i < count && status == ESPER_OK; i++) {
    block_t *block = marks_lock_block(core, ptrs[i]);
    if (!block)
      continue;
    if (needs_use(block, stream))
      status = attach(block, stream, record, flags);
    unlock(&device_of(block)->lock);
  }
  return status;
}

static void count_captured(core_t *core, int device)
{
  lock(&core->devices[device].lock);
  core->devices[device].counters.captured_uses++;
  unlock(&core->devices[device].lock);
}

static unsigned use_flags(unsigned flags)
{
  return flags & ESPER_USE_NO_GATE ? USE_NO_GATE : 0;
}

esper_status marks_record_use(core_t *core, const void *const *ptrs, size_t count,
                              esper_stream as, unsigned flags, size_t *marked)
{
  size_t found = 0;
  presented_t p;
  esper_status status = stream_present(core, as, &p);
  if (status != ESPER_OK)
    return status;
  if (any_needs_use(core, ptrs, count, p.stream, &found) && !is_lost(core, as.device)) {
    record_t *record = stream_record(p);
    if (!record && stream_capture_of(p, true))
      count_captured(core, as.device);
    status = attach_all(core, ptrs, count, p.stream, record, use_flags(flags));
    if (record)
      record_drop(record);
    /* Long-lived tensors that are marked again and again pin no events. */
    if ((atomic_fetch_add(&p.stream->marks, 1) + 1) % MARKS_PER_RETIREMENT == 0)
      stream_retire(p.stream);
  }
  if (marked)
    *marked = found;
  return status;
}

static esper_status carrier_create(device_t *device, stream_t **carrier)
{
  core_t *core = device->core;
  void *handle;
  uint64_t id;
  esper_status status = call_stream_create(core, device->index, &handle);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  status = call_stream_id(core, device->index, handle, &id);
  if (status != ESPER_OK)
    error_from_driver(core, status);
  else if (!(*carrier = stream_create(core, device, id, handle)))
    status = error_set(ESPER_HOST_MEMORY, "no host memory for a stream");
  if (status == ESPER_OK)
    stream_make_immortal(core, *carrier, handle);
  else
    call_stream_destroy(core, device->index, handle);
  return status;
}

/* Not under the device's sync lock: whoever synchronises may be waiting for
 * what the caller enqueues next. */
static esper_status carrier_of(device_t *device, bool gate, stream_t **carrier)
{
  core_t *core = device->core;
  _Atomic(stream_t *) *made = &device->carriers[!gate];
  esper_status status = ESPER_OK;
  if ((*carrier = atomic_load(made)))
    return ESPER_OK;
  lock(&core->config_lock);
  if (!(*carrier = atomic_load(made)))
    status = carrier_create(device, carrier);
  if (status == ESPER_OK)
    atomic_store(made, *carrier);
  unlock(&core->config_lock);
  return status;
}

esper_status marks_record_use_event(core_t *core, const void *const *ptrs, size_t count,
                                    void *event, int device, unsigned flags, size_t *marked)
{
  size_t found = 0;
  stream_t *carrier;
  bool gate = !(flags & ESPER_USE_NO_GATE);
  esper_status status = carrier_of(&core->devices[device], gate, &carrier);
  if (status != ESPER_OK)
    return status;
  if (any_needs_use(core, ptrs, count, carrier, &found)) {
    record_t *record = stream_record_event(carrier, event, device);
    /* Without the event the carrier knows nothing of that work: any stream's it may be. */
    stream_t *user = record ? carrier : core->devices[device].all_streams;
    status = attach_all(core, ptrs, count, user, record, use_flags(flags));
    if (record)
      record_drop(record);
    stream_retire(carrier);
  }
  if (marked)
    *marked = found;
  return status;
}

static esper_status attach_at_free(core_t *core, const void *ptr, stream_t *stream)
{
  block_t *block = marks_lock_block(core, ptr);
  if (!block)
    return error_set(ESPER_INVALID, "%p is in no live block of this allocator", ptr);
  device_t *device = device_of(block);
  esper_status status = ESPER_OK;
  if (!stream)
    stream = device->all_streams;
  if (needs_use(block, stream))
    status = attach(block, stream, NULL, USE_AT_FREE);
  unlock(&device->lock);
  return status;
}

esper_status marks_record_stream(core_t *core, const void *ptr, esper_stream as)
{
  presented_t p;
  esper_status status = stream_present(core, as, &p);
  return status == ESPER_OK ? attach_at_free(core, ptr, p.stream) : status;
}

esper_status marks_free_after_all(core_t *core, const void *ptr)
{
  return attach_at_free(core, ptr, NULL);
}
