/* event.h: events, and waiting for them. */
#ifndef ESPER_SIM_EVENT_H
#define ESPER_SIM_EVENT_H

#include "state.h"

void sim_events_destroy(sim *s);
void *sim_event_new(sim *s, int device, int of_core);
/* Finds an event of the device (-1: of any). NULL, after a report that names `who`: there is
 * none. */
sim_event *sim_event_find(sim *s, int device, void *handle, const char *who);
void sim_event_kill(sim *s, void *handle);
void sim_record_now(sim *s, sim_stream *stream, sim_event *event);
/* Makes the event stand for what is on every stream of the device. */
esper_status sim_record_all_now(sim *s, int device, sim_event *event);
esper_status sim_query_now(sim *s, sim_event *event);
esper_status sim_wait_host(sim *s, sim_event *event);
/* The same for some time: ESPER_NOT_READY if the event has not completed then. */
esper_status sim_wait_host_while(sim *s, sim_event *event);
esper_status sim_wait_device(sim *s, int device);
esper_status sim_wait_stream(sim *s, sim_stream *stream, sim_event *event, int of_core);

#endif
