#include "drain.h"

#include "../base/call.h"
#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/use.h"
#include "../order/capturing.h"
#include "../order/host_wait.h"
#include "../order/record.h"
#include "../order/retire.h"
#include "../pools/pool.h"

/* ---- held uses ----------------------------------------------------------- */

/* Gives the record to those held uses on the device's blocks that it covers. */
static void cover_uses(device_t *device, record_t *record)
{
  lock(&device->lock);
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    for (block_t *b = heap->oldest_pending; b; b = b->newer)
      for (use_t *use = b->uses; use; use = use->next)
        use_cover(use, record);
  unlock(&device->lock);
}

void held_uses_record(core_t *core, presented_t p)
{
  atomic_store(&p.stream->holds, false);
  record_t *record = stream_record(p);
  if (!record) {
    atomic_store(&p.stream->holds, true);
    return;
  }
  /* A stream of one device may have uses on blocks of any device. */
  for (int d = 0; d < core->device_count; d++)
    if (atomic_load(&core->devices[d].ready))
      cover_uses(&core->devices[d], record);
  record_drop(record);
  atomic_fetch_add(&core->progress, 1);
}

/* ---- a device is waited for -------------------------------------------- */

/* Consumes the reference. */
static esper_status wait_for_record(record_t *record, unsigned how)
{
  esper_status status = how & DRAIN_LIMITED ? record_wait_limited(record) : record_wait(record);
  record_drop(record);
  return status;
}

/* Waits for each stream that can record an event now. Sets *left if some stream cannot, and
 * *capturing if a stream is being captured. */
static esper_status wait_for_streams(device_t *device, unsigned how, bool *left, bool *capturing)
{
  esper_status all = ESPER_OK;
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next) {
    if (s->device != device)
      continue;
    if (s->all_streams) {
      *left |= atomic_load(&s->holds) || atomic_load(&s->has_outstanding);
      continue;
    }
    if (!s->immortal) {
      *left = true;
      continue;
    }
    record_t *record = stream_record_unpresented(s);
    esper_status status;
    if (!record) {
      uint64_t capture = 0;
      status = call_stream_capture(s->core, device->index, s->handle, &capture);
      if (status == ESPER_DEVICE_ERROR || status == ESPER_SHUT_DOWN)
        return error_from_driver(s->core, status);
      *capturing |= status != ESPER_OK || capture;
      *left = true;
      continue;
    }
    if (all != ESPER_OK) { /* the time is over */
      record_drop(record);
      continue;
    }
    status = wait_for_record(record, how);
    if (status == ESPER_NOT_READY)
      all = status;
    else if (status != ESPER_OK)
      return status;
  }
  return all;
}

/* Synchronising ends the captures that nobody announced. One that begins meanwhile is noted
 * again. */
static esper_status synchronize(device_t *device, unsigned how)
{
  (void)how;
  stream_forget_captures(device);
  esper_status status = call_device_synchronize(device->core, device->index);
  return status == ESPER_OK ? status : error_from_driver(device->core, status);
}

/* One event for the work of all streams. */
static esper_status wait_for_event(device_t *device, unsigned how)
{
  record_t *record = stream_record_unpresented(device->all_streams);
  if (!record)
    return ESPER_UNSUPPORTED;
  return wait_for_record(record, how);
}

/* `wait` waits for everything that was enqueued on the device before. */
static esper_status wait_for_device(device_t *device, unsigned how,
                                    esper_status wait(device_t *, unsigned))
{
  core_t *core = device->core;
  atomic_bool *holds = &device->all_streams->holds; /* a mark may set it again meanwhile */
  bool held = atomic_exchange(holds, false);
  for (stream_t *s = atomic_load(&core->streams); s; s = s->next)
    if (s->device == device)
      stream_sync_begin(s);
  esper_status status = wait(device, how);
  if (status != ESPER_OK) {
    if (held)
      atomic_store(holds, true);
    return status;
  }
  for (stream_t *s = atomic_load(&core->streams); s; s = s->next)
    if (s->device == device)
      stream_sync_done(s);
  return ESPER_OK;
}

/* Whether a stream that the core has never met may be captured: nobody announces captures, and a
 * pool is open that may be for one. */
static bool may_be_a_capture(device_t *device)
{
  return !config_of(device->core)->as_given.captures_are_announced &&
         capturing_is_possible_now(device);
}

/* Drains this device only. Owner order and streams that the core has never met need one event for
 * all streams, or that the device is synchronised. */
static esper_status drain_alone(device_t *device, unsigned how)
{
  lock(&device->sync_lock);
  esper_status status = wait_for_device(device, how, wait_for_event);
  if (status == ESPER_OK || status == ESPER_NOT_READY) {
    unlock(&device->sync_lock);
    return status;
  }
  bool left = !(how & DRAIN_GENTLY) || !may_be_a_capture(device), capturing = false;
  status = wait_for_streams(device, how, &left, &capturing);
  /* A capture may have begun meanwhile. If captures are not announced, a pool that was begun does
   * not prove that one is going on. */
  if (status == ESPER_OK && left)
    status = capturing || capturing_is_announced(device) || stream_any_is_captured(device)
                 ? error_set(ESPER_CAPTURING,
                             "a stream of device %d is being captured: end the capture first",
                             device->index)
                 : wait_for_device(device, how, synchronize);
  unlock(&device->sync_lock);
  return status;
}

/* Whether free memory of the device has an unfinished use by a stream of the other device. */
static bool waits_for(device_t *device, const device_t *other)
{
  bool waits = false;
  lock(&device->lock);
  for (const heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    for (const block_t *b = heap->oldest_pending; b && !waits && !heap->capture; b = b->newer)
      for (const use_t *use = b->uses; use; use = use->next)
        waits |= use->stream->device == other && !use_has_completed(use);
  unlock(&device->lock);
  return waits;
}

esper_status drain_device(device_t *device, unsigned how)
{
  core_t *core = device->core;
  esper_status status = drain_alone(device, how);
  for (int d = 0; d < core->device_count; d++) {
    device_t *other = &core->devices[d];
    if (other != device && atomic_load(&other->ready) && waits_for(device, other))
      drain_alone(other, how | DRAIN_LIMITED); /* better no memory than no end */
  }
  pools_retire(device);
  return status;
}

esper_status drain_at_any_cost(device_t *device)
{
  lock(&device->sync_lock);
  esper_status status = wait_for_device(device, 0, synchronize);
  unlock(&device->sync_lock);
  return status;
}
