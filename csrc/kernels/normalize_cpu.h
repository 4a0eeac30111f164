// The normalisers on the CPU, with the same behaviour as in normalize.h, for host memory.
#pragma once

#include "normalize.h"

namespace esper
{

// `out` may be null, as in esper_normalizer_update. The result does not depend on the
// number of threads.
void normalizer_update_cpu(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                           const esper_normalizer_rule &rule, void *out);

void normalizer_apply_cpu(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                          const esper_normalizer_rule &rule, void *out);

} // namespace esper
