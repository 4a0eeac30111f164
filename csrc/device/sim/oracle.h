/* oracle.h: who may touch which bytes. */
#ifndef ESPER_SIM_ORACLE_H
#define ESPER_SIM_ORACLE_H

#include "state.h"

void sim_oracle_destroy(sim *s);
/* Notes an access by an operation that was just enqueued (node SIM_NONE), or
 * by a node of the stream's capture. 0, after a report: not allowed. `owner`
 * 0: the bytes' live owner, else a replay on behalf of that owner. */
int sim_oracle_access(sim *s, sim_stream *stream, uint64_t index, uint32_t node, uintptr_t address,
                      size_t size, uint64_t owner);
/* The live owner of all the bytes; 0, after a report: there is none. */
uint64_t sim_oracle_owner(sim *s, const char *who, uintptr_t address, size_t size);
/* An operation executes: it checks the bytes' content, or writes it. */
void sim_pattern_access(sim *s, const sim_op *op);

#endif
