#include "record_use.h"

#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/find.h"
#include "../blocks/map.h"
#include "../blocks/use.h"
#include "../order/capture.h"
#include "../order/capture_thread.h"
#include "../order/capturing.h"
#include "../order/record.h"
#include "../order/retire.h"
#include "../order/stream.h"

esper_status mark_attach(block_t *block, stream_t *stream, record_t *record, unsigned flags)
{
  use_t *use = NULL;
  if (use_attach(block, stream, record, flags, &use))
    return ESPER_OK;
  device_t *device = block_device(block);
  uses_drop_completed(device, block);
  use = use_take(device);
  if (use && use_attach(block, stream, record, flags, &use))
    return ESPER_OK;
  if (record)
    record_drop(record);
  return error_set(ESPER_HOST_MEMORY, "no host memory for a use");
}

esper_status mark_on_all_streams(block_t *block, unsigned flags)
{
  core_t *core = block_device(block)->core;
  esper_status status = ESPER_OK;
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++)
    if (atomic_load(&core->devices[i].ready))
      status = mark_attach(block, core->devices[i].all_streams, NULL, flags);
  return status;
}

/* Whether a mark on `stream` must become a use of the block. The block's own stream needs none. */
static bool needs_use(const block_t *block, const stream_t *stream)
{
  if (!RULE(MARK_FROM_ANY_DEVICE) && stream->device != block_device(block))
    return false;
  return !block_is_of(block, stream);
}

/* Finds a block that needs a use, without a lock. If the address starts a live block, only the
 * caller may free it, so looking is safe. A wrong address is noticed later, under the lock. NULL:
 * there is no such block. */
static block_t *peek(core_t *core, const void *ptr, const stream_t *stream)
{
  block_t *block = ptr ? map_find(core->map, (uintptr_t)ptr) : NULL;
  return block && needs_use(block, stream) ? block : NULL;
}

/* Whether an event must be recorded. If not, *found is the number of addresses in live blocks. */
static bool any_needs_use(core_t *core, const void *const *ptrs, size_t count,
                          const stream_t *stream, size_t *found)
{
  for (size_t i = 0; i < count; i++) {
    if (peek(core, ptrs[i], stream))
      return true;
    block_t *block = find_lock_live(core, ptrs[i]);
    if (!block)
      continue;
    bool needs = needs_use(block, stream);
    unlock(&block_device(block)->lock);
    if (needs)
      return true;
    ++*found;
  }
  return false;
}

/* Counts a mark of the block. Under the lock of the block's device. */
static void count_mark(const block_t *block, unsigned flags)
{
  esper_counters *counters = &block_device(block)->counters;
  *(flags & USE_AT_FREE ? &counters->marks_until_free : &counters->marks_exact) += 1;
}

/* Takes over the reference to the record. */
static esper_status attach_all(core_t *core, const void *const *ptrs, size_t count,
                               stream_t *stream, record_t *record, size_t *found)
{
  esper_status status = ESPER_OK;
  *found = 0;
  for (size_t i = 0; i < count && status == ESPER_OK; i++) {
    block_t *block = find_lock_live(core, ptrs[i]);
    if (!block)
      continue;
    ++*found;
    if (needs_use(block, stream)) {
      record_t *given = record;
      if (i + 1 == count)
        record = NULL;
      else if (record)
        record_keep(record);
      status = mark_attach(block, stream, given, 0);
      if (status == ESPER_OK)
        count_mark(block, 0);
    }
    unlock(&block_device(block)->lock);
  }
  if (record)
    record_drop(record);
  return status;
}

static void count_captured(device_t *device)
{
  lock(&device->lock);
  device->counters.captured_uses++;
  unlock(&device->lock);
}

static esper_status attach_point(block_t *block, capture_point_t point)
{
  use_t *use = use_take(block_device(block));
  if (!use)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a use");
  branch_keep(point.branch);
  use_attach_point(block, point, &use);
  if (use)
    use_give(block_device(block), use);
  return ESPER_OK;
}

/* Marks on a stream that is being captured. For memory of the same capture, the use is a point in
 * the graph. Other memory is held until all devices have done the work that they had at the free,
 * because the graph may be replayed on any stream of any device. */
static esper_status mark_inside(core_t *core, const void *const *ptrs, size_t count, presented_t p,
                                size_t *found)
{
  capture_point_t point = {0};
  esper_status status = ESPER_OK;
  bool active = p.capture != CAPTURE_UNKNOWN && p.capture != ESPER_CAPTURE_INVALID;
  branch_t *branch = active ? capture_branch(core, p.stream, p.capture) : NULL;
  bool has_point = branch && branch_point(branch, p.handle, &point), outside = false;
  if (p.capture != ESPER_CAPTURE_INVALID)
    capture_thread_note(p.capture, p.stream);
  *found = 0;
  for (size_t i = 0; i < count && status == ESPER_OK; i++) {
    block_t *block = find_lock_live(core, ptrs[i]);
    if (!block)
      continue;
    ++*found;
    bool own = has_point && block->capture == p.capture;
    if (own && needs_use(block, p.stream))
      count_mark(block, 0);
    if (needs_use(block, p.stream))
      status = own ? attach_point(block, point) : mark_on_all_streams(block, USE_READ_BY_GRAPH);
    outside |= !own && needs_use(block, p.stream);
    unlock(&block_device(block)->lock);
  }
  capture_point_drop(&point);
  if (branch)
    branch_drop(branch);
  if (outside)
    count_captured(p.stream->device);
  return status;
}

static esper_status mark(core_t *core, const void *const *ptrs, size_t count, presented_t p,
                         size_t *found)
{
  *found = 0;
  if (!any_needs_use(core, ptrs, count, p.stream, found))
    return ESPER_OK;
  record_t *record = stream_record_begin(&p);
  if (!record && p.capture)
    return mark_inside(core, ptrs, count, p, found);
  if (record)
    stream_record_end(p.stream, NULL);
  return attach_all(core, ptrs, count, p.stream, record, found);
}

/* A record that is replaced goes back to its stream under the record lock, which is held anyway. */
esper_status mark_found_block(block_t *block, const void *ptr, presented_t p, size_t *found)
{
  const segment_t *segment = block_segment_if_any(block);
  *found = 0;
  if (!segment)
    return ESPER_OK;
  device_t *device = segment->device;
  esper_status status = ESPER_OK;
  record_t *record = stream_record_begin(&p), *replaced = NULL;
  if (!record && p.capture)
    return mark_inside(device->core, &ptr, 1, p, found);
  lock(&device->lock);
  *found = block_is_live_at(block, (uintptr_t)ptr);
  if (*found && record)
    replaced = use_replace(block, record);
  if (*found && !replaced)
    status = mark_attach(block, p.stream, record, 0);
  if (*found && status == ESPER_OK)
    count_mark(block, 0);
  unlock(&device->lock);
  if (!*found && record)
    record_drop(record);
  bool only_ours = replaced && record_release(replaced);
  if (record)
    stream_record_end(p.stream, only_ours ? replaced : NULL);
  return status;
}

static esper_status mark_on(core_t *core, const void *const *ptrs, size_t count, presented_t p,
                            size_t *found)
{
  block_t *block = count == 1 ? peek(core, ptrs[0], p.stream) : NULL;
  return block ? mark_found_block(block, ptrs[0], p, found) : mark(core, ptrs, count, p, found);
}

esper_status mark_present(core_t *core, esper_stream as, presented_t *p)
{
  esper_status status = stream_present(core, as, p);
  if (status != ESPER_OK)
    capture_thread_refused(core);
  return status;
}

/* Marks that last until the free, where those on memory of the same capture get their point
 * (malloc_owe_inside). On memory from outside a mark in a capture lasts until all work is done that
 * the devices had at the free, because the graph may be replayed on any stream. */
static esper_status mark_until_free(core_t *core, const void *const *ptrs, size_t count,
                                    presented_t p, size_t *found)
{
  uint64_t capture = stream_capture_of(p, true);
  esper_status status = ESPER_OK;
  bool any_outside = false;
  *found = 0;
  if (capture && capture != ESPER_CAPTURE_INVALID)
    capture_thread_note(capture, p.stream);
  for (size_t i = 0; i < count && status == ESPER_OK; i++) {
    block_t *block = find_lock_live(core, ptrs[i]);
    if (!block)
      continue;
    ++*found;
    if (needs_use(block, p.stream)) {
      bool outside = capture && capture != block->capture;
      status = outside ? mark_on_all_streams(block, USE_AT_FREE | USE_READ_BY_GRAPH)
                       : mark_attach(block, p.stream, NULL, USE_AT_FREE);
      if (status == ESPER_OK)
        count_mark(block, USE_AT_FREE);
      any_outside |= outside;
    }
    unlock(&block_device(block)->lock);
  }
  if (any_outside)
    count_captured(p.stream->device);
  return status;
}

esper_status mark_use(core_t *core, const void *const *ptrs, size_t count, esper_stream as,
                      unsigned flags, size_t *marked)
{
  size_t found = 0;
  presented_t p;
  esper_status status = mark_present(core, as, &p);
  if (status != ESPER_OK)
    return status;
  if (!RULE(MARK_DESPITE_CAPTURES) && stream_any_is_captured(p.stream->device))
    return ESPER_OK;
  if (flags & ESPER_USE_UNTIL_FREE && RULE(MARK_LASTS_UNTIL_FREE))
    status = mark_until_free(core, ptrs, count, p, &found);
  else
    status = mark_on(core, ptrs, count, p, &found);
  if (status == ESPER_OK && marked)
    *marked = found;
  return status;
}

bool mark_by_handle(core_t *core, const void *ptr, void *handle, esper_status *status)
{
  size_t found;
  presented_t p;
  if (!stream_find(core, handle, &p))
    return false;
  *status = mark_on(core, &ptr, 1, p, &found);
  return true;
}

/* The carrier is the core's own stream that waits for foreign events. It is not made under the
 * device's sync lock: the thread that synchronises may be waiting for work that the caller enqueues
 * next. */
static esper_status carrier_of(device_t *device, stream_t **carrier)
{
  core_t *core = device->core;
  _Atomic(stream_t *) *made = &device->carrier;
  esper_status status = ESPER_OK;
  if ((*carrier = atomic_load(made)))
    return ESPER_OK;
  lock(&core->config_lock);
  if (!(*carrier = atomic_load(made)))
    status = stream_create_own(device, carrier);
  if (status == ESPER_OK)
    atomic_store(made, *carrier);
  unlock(&core->config_lock);
  return status;
}

esper_status mark_use_event(core_t *core, const void *const *ptrs, size_t count, void *event,
                            int device, size_t *marked)
{
  size_t found = 0;
  stream_t *carrier;
  esper_status status = carrier_of(&core->devices[device], &carrier);
  if (status != ESPER_OK)
    return status;
  if (any_needs_use(core, ptrs, count, carrier, &found)) {
    record_t *record = stream_record_event(carrier, event, device);
    /* If the event cannot be waited for, its work may be on any stream. */
    stream_t *user = record ? carrier : core->devices[device].all_streams;
    status = attach_all(core, ptrs, count, user, record, &found);
    stream_retire(carrier);
  }
  if (marked)
    *marked = found;
  return status;
}

static esper_status error_not_live(const void *ptr)
{
  return error_set(ESPER_INVALID, "%p is in no live block of this allocator", ptr);
}

esper_status mark_stream(core_t *core, const void *ptr, esper_stream as)
{
  size_t found = 0;
  presented_t p;
  esper_status status = mark_present(core, as, &p);
  if (status == ESPER_OK)
    status = mark_until_free(core, &ptr, 1, p, &found);
  return status == ESPER_OK && !found ? error_not_live(ptr) : status;
}

esper_status mark_until_all_done(core_t *core, const void *ptr)
{
  block_t *block = find_lock_live(core, ptr);
  if (!block)
    return error_not_live(ptr);
  device_t *device = block_device(block);
  esper_status status = mark_attach(block, device->all_streams, NULL, USE_AT_FREE);
  device->counters.marks_until_free++;
  unlock(&device->lock);
  return status;
}
