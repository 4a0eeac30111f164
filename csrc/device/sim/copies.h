/* copies.h: copies between device and host memory. */
#ifndef ESPER_SIM_COPIES_H
#define ESPER_SIM_COPIES_H

#include "state.h"

/* Enqueues a copy between device memory at `address` and host memory, or a fill with zeros (`host`
 * NULL). */
esper_status sim_copy(sim *s, sim_op_kind kind, sim_stream *stream, uintptr_t address, void *host,
                      size_t size);

#endif
