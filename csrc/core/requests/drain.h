/* drain.h: waiting for a device, and held uses.
 *
 * A use is held when no event could be recorded for it: its stream was being captured, was a mortal
 * stream that was not presented, or the driver refused. Its block stays pending until the stream is
 * presented again, or the device was synchronised. */
#ifndef ESPER_DRAIN_H
#define ESPER_DRAIN_H

#include "../order/stream.h"

/* Records an event for the held uses of a stream that was presented. Uses on memory of a capture
 * stay held, because an event says nothing about replays. */
void held_uses_record(core_t *core, presented_t presented);

enum {
  /* While a pool is open, a device is not synchronised on which a stream that the core has never
   * met may be captured, unannounced. */
  DRAIN_GENTLY = 1u,
  /* No longer than host_wait.h says, except where no event stands for all streams: there the device
   * is synchronised. */
  DRAIN_LIMITED = 2u
};

/* Waits for everything enqueued on the device's streams, and notes what has completed: by one event
 * for all of them. Where the driver cannot record that, as during a capture, it goes stream by
 * stream as far as possible, because the driver's way of waiting for a whole device ends the
 * captures that are going on there. Then it drains the other devices that free memory of this one
 * waits for. `how`: DRAIN_... ESPER_CAPTURING: a stream is being captured; everything else has been
 * waited for. ESPER_NOT_READY: the limit ended the wait. */
esper_status drain_device(device_t *device, unsigned how);

/* The same by synchronising the device. For a caller who has tried all else, and may not go on
 * before the work is done: during a capture the driver refuses (ESPER_CAPTURING) and ends it. */
esper_status drain_at_any_cost(device_t *device);

#endif
