#include "settle.h"

#include "call.h"
#include "error.h"
#include "heap.h"
#include "use.h"

/* Calls `visit` for each use of each pending block, under the lock; true
 * takes the use away. A capture's memory is nobody else's, so it is passed. */
typedef bool use_visitor(use_t *use, void *context);

static void visit_pending_uses(device_t *device, use_visitor *visit, void *context)
{
  lock(&device->lock);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      for (block_t *b = heap->oldest_pending; b && !heap->capture; b = b->newer)
        for (use_t **link = &b->uses; *link;) {
          use_t *use = *link;
          if (visit(use, context)) {
            *link = use->next;
            use_give(device, use);
          } else {
            link = &use->next;
          }
        }
  unlock(&device->lock);
}

/* Uses on one device's streams may lie on blocks of any device. */
static void visit_all_pending_uses(core_t *core, use_visitor *visit, void *context)
{
  for (int d = 0; d < core->device_count; d++)
    if (atomic_load(&core->devices[d].ready))
      visit_pending_uses(&core->devices[d], visit, context);
}

/* ---- a stream presents itself ------------------------------------------ */

static bool give_record(use_t *use, void *context)
{
  record_t *record = context;
  if (use->stream == record->stream && !use->record) {
    record_keep(record);
    use_set_record(use, record);
  }
  return false;
}

void settle_stream(core_t *core, presented_t p)
{
  atomic_store(&p.stream->holds, false);
  record_t *record = stream_record(p);
  if (!record) {
    atomic_store(&p.stream->holds, true);
    return;
  }
  visit_all_pending_uses(core, give_record, record);
  record_drop(record);
  atomic_fetch_add(&core->epoch, 1);
}

/* ---- a device is waited for -------------------------------------------- */

static bool find_no_gate(use_t *use, void *context)
{
  bool done = use->record && stream_completed(use->stream, use->record->number);
  if (use->flags & USE_NO_GATE && !done)
    *(bool *)context = true;
  return false;
}

bool settle_may_wait(device_t *device)
{
  bool found = false;
  visit_pending_uses(device, find_no_gate, &found);
  return !found;
}

/* A held use on the device is marked before the wait and leaves after it. */
typedef struct sync {
  const device_t *device;
  size_t held;
} sync_t;

static bool mark_held(use_t *use, void *context)
{
  sync_t *sync = context;
  if (use->stream->device == sync->device && !use->record) {
    use->flags |= USE_SYNCING;
    sync->held++;
  }
  return false;
}

static bool drop_marked(use_t *use, void *context)
{
  const sync_t *sync = context;
  return use->stream->device == sync->device && use->flags & USE_SYNCING;
}

/* Waits for each stream that can record an event now. *left: some cannot, for
 * want of a handle; *capturing: one is being captured. */
static esper_status wait_for_streams(device_t *device, bool *left, bool *capturing)
{
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next) {
    if (s->device != device || s->all_streams)
      continue;
    if (!s->immortal) {
      *left = true;
      continue;
    }
    record_t *record = stream_record_later(s);
    if (!record) {
      *capturing |= stream_capture_of((presented_t){s, s->handle}, true) != 0;
      *left = true;
      continue;
    }
    esper_status status = stream_wait_host(record);
    record_drop(record);
    if (status != ESPER_OK)
      return status;
  }
  return ESPER_OK;
}

static esper_status wait_for_device(device_t *device, sync_t *sync)
{
  core_t *core = device->core;
  enum { MOST = 1024 }; /* further streams learn of it at the next occasion */
  struct {
    stream_t *stream;
    uint64_t number;
  } begun[MOST];
  int count = 0;
  for (stream_t *s = atomic_load(&core->streams); s && count < MOST; s = s->next)
    if (s->device == device) {
      begun[count].stream = s;
      stream_sync_begin(s, &begun[count++].number);
    }
  esper_status status = call_device_synchronize(core, device->index);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  for (int i = 0; i < count; i++)
    stream_sync_done(begun[i].stream, begun[i].number);
  visit_all_pending_uses(core, drop_marked, sync);
  atomic_fetch_add(&core->epoch, 1);
  return ESPER_OK;
}

esper_status settle_device(device_t *device)
{
  lock(&device->sync_lock);
  sync_t sync = {.device = device};
  bool left = false, capturing = false;
  visit_all_pending_uses(device->core, mark_held, &sync);
  esper_status status = wait_for_streams(device, &left, &capturing);
  if (status == ESPER_OK && (left || sync.held))
    status = capturing ? error_set(ESPER_CAPTURING, "a stream of device %d is being captured",
                                   device->index)
                       : wait_for_device(device, &sync);
  unlock(&device->sync_lock);
  heap_retire(device);
  return status;
}
