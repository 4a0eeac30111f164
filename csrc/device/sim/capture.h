/* capture.h: captures, and what the driver says about them. */
#ifndef ESPER_SIM_CAPTURE_H
#define ESPER_SIM_CAPTURE_H

#include "state.h"

void sim_capture_destroy_all(sim *s);
esper_status sim_tails_now(const sim_stream *stream, uint64_t capture, void **tails, size_t *count);
esper_status sim_before_now(sim *s, const sim_stream *stream, uint64_t capture, void *node,
                            void **before, size_t *count);

#endif
