/* held.h: a driver over another driver, some of whose streams stay busy until
 * they are told otherwise.
 *
 * A replayed history knows that a stream was still reading some memory up to
 * a certain entry, and not what it was doing. Over this driver such a stream
 * is held: what is recorded on it has not completed until it is released.
 * Every call goes to the driver below, so that its costs are real; only
 * answers about held work differ. Whoever waits for held work, the host or a
 * stream, waits until it is over: the wait releases it.
 *
 * Unlike other drivers this one serves one thread at a time. */
#ifndef ESPER_HELD_H
#define ESPER_HELD_H

#include "device.h"

typedef struct held held;

/* NULL: no host memory. `below` must outlive it. */
held *held_create(const esper_driver *below);
void held_destroy(held *h);
const esper_driver *held_driver(held *h);

/* From now on, what is recorded on the stream stays pending. 0: no host
 * memory. Holding a held stream changes nothing. */
int held_hold(held *h, void *stream);

/* What was recorded on the stream while it was held may complete. */
void held_release(held *h, void *stream);

#endif
