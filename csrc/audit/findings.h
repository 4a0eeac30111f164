/* findings.h: what was found, equal findings once. */
#ifndef ESPER_AUDIT_FINDINGS_H
#define ESPER_AUDIT_FINDINGS_H

#include "state.h"

/* Equal are findings of the same kind at the same sites. A new one is its own cause. NULL: no host
 * memory. */
audit_finding *finding_add(audit *a, const audit_finding *finding);
/* The number that equal findings have in common. */
uint64_t finding_key(const audit_finding *finding);

#endif
