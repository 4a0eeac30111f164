/* footprint.h: which bytes two accesses have in common. */
#ifndef ESPER_AUDIT_FOOTPRINT_H
#define ESPER_AUDIT_FOOTPRINT_H

#include "audit.h"

/* Whether a byte may lie in both. Exact if at most one of them has a period, or both the same one;
 * of different periods the answer is that of their ranges. */
int footprint_overlaps(const audit_footprint *a, const audit_footprint *b);
/* Whether every byte of `inner` surely lies in `outer`. */
int footprint_covers(const audit_footprint *outer, const audit_footprint *inner);

#endif
