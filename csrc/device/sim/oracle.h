/* oracle.h: the oracle, which knows who may touch which bytes. */
#ifndef ESPER_SIM_ORACLE_H
#define ESPER_SIM_ORACLE_H

#include "state.h"

void sim_oracle_destroy(sim *s);
/* Notes an access by an operation that was just enqueued (`node` SIM_NONE), or by a node of the
 * stream's capture. Returns 0, after a report, if it is not allowed. `owner`: 0 for the bytes' live
 * owner, otherwise the owner for whom a replay accesses them. */
int sim_oracle_access(sim *s, sim_stream *stream, uint64_t index, uint32_t node, uintptr_t address,
                      size_t size, uint64_t owner);
/* Notes an access by an operation of the driver. */
void sim_oracle_mark(sim *s, sim_stream *stream, uint64_t index, uintptr_t address, size_t size);
/* The live owner of all the bytes. 0, after a report: there is none. */
uint64_t sim_oracle_owner(sim *s, const char *who, uintptr_t address, size_t size);
/* Checks the bytes' content, or writes it, when an operation executes. */
void sim_pattern_access(sim *s, const sim_op *op);

#endif
