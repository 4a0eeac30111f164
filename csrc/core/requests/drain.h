/* drain.h: waiting for a device, and the uses that no event stands for.
 *
 * A use is held when no event could be recorded for it: its stream was being captured, was mortal
 * and not at hand, or the driver refused. Its block waits until the stream presents itself again,
 * or the device was synchronised. */
#ifndef ESPER_DRAIN_H
#define ESPER_DRAIN_H

#include "../order/stream.h"

/* The stream is here: an event on it covers the uses held for it. Not those on memory of a capture:
 * the event says nothing of replays. */
void drain_held_uses(core_t *core, presented_t presented);

/* Waits for everything enqueued on the device's streams and takes note: stream by stream as far as
 * that goes, because the driver's way of waiting for a whole device breaks the captures that are
 * going on there. Then the same for the other devices that the free memory of this one waits for,
 * if the host may wait for them. ESPER_CAPTURING: a stream is being captured; what could be waited
 * for has been. */
esper_status drain_device(device_t *device);

/* The same for whoever may use memory that is not this core's: streams that the core has never met,
 * too. */
esper_status drain_device_and_unknown_streams(device_t *device);

/* Whether the host may wait for the whole device: not while a block, or a stream of rendezvous
 * work, waits for what this very thread may still have to enqueue. */
bool drain_may_wait(device_t *device);

#endif
