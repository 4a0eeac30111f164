/* queue.h: streams as queues of operations, and the passing of time. */
#ifndef ESPER_SIM_QUEUE_H
#define ESPER_SIM_QUEUE_H

#include "state.h"

void sim_queue_destroy(sim *s);
/* Enqueues an operation and returns its number in the stream's slot. */
uint64_t sim_enqueue(sim *s, sim_stream *stream, const sim_op *op);
int sim_op_is_done(const sim *s, uint32_t slot, uint64_t index);
/* Lets time pass until that operation is done. 0, after a report: it never will be. */
int sim_run_to(sim *s, sim_stream *stream, uint64_t index);
/* The same without a report. */
int sim_try_to_reach(sim *s, sim_stream *stream, uint64_t index);
/* Lets a random amount of time pass. */
void sim_let_time_pass(sim *s);

#endif
