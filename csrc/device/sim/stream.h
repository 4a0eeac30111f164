/* stream.h: streams and their handles. */
#ifndef ESPER_SIM_STREAM_H
#define ESPER_SIM_STREAM_H

#include "state.h"

/* Makes the legacy streams of the devices. */
void sim_streams_init(sim *s);
void sim_streams_destroy(sim *s);
void *sim_stream_new(sim *s, int device, int of_core);
/* NULL: there is no such stream; reported if `who` is given. */
sim_stream *sim_stream_find(sim *s, int device, void *handle, const char *who);
/* The program gave the stream its last operation. */
void sim_stream_given(sim_stream *stream);
/* The core is about to make the stream wait. */
void sim_stream_core_waits(sim *s, sim_stream *stream);
void sim_stream_kill(sim *s, sim_stream *stream);
void *sim_stream_handle(const sim_stream *stream);

#endif
