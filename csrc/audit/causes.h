/* causes.h: which findings a missing wait explains. Of each finding that nothing explains it is
 * assumed that its stream waited just before, and what this would have ordered has that cause. */
#ifndef ESPER_AUDIT_CAUSES_H
#define ESPER_AUDIT_CAUSES_H

#include "state.h"

/* Adds a finding that a wait of the lane, now, would have prevented: for the work that has the slot
 * and the epoch. */
void cause_add(audit *a, const audit_finding *finding, const lane *l, uint32_t slot,
               uint64_t epoch);
/* The first finding (its index) whose missing wait would have ordered the lane after that work.
 * AUDIT_NO_CAUSE: there is none. */
size_t cause_of(const audit *a, const lane *l, uint32_t slot, uint64_t epoch);
/* The lane ends, and its slot will name another one. */
void causes_forget(audit *a, const lane *l);

#endif
