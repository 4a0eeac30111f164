// What the auditor sees of operators: which memory each accesses, and where in the program.
#pragma once

#include <c10/util/SmallVector.h>

#include "../automatic/operator_memory.h"
#include "audit_engine.h"
#include "operations.h"

namespace esper::auditing
{

// One access, with what is found out before the engine's lock is taken.
struct Seen {
  audit_access access;
  const c10::TensorImpl *tensor;
  c10::cuda::CUDAStream stream;
};
using AllSeen = c10::SmallVector<Seen, 8>;

void add_seen(AllSeen &all, const Access &access, bool writes);
// The operation accesses them now.
void tell_accesses(AllSeen &all, uint32_t operation);

// Where the calling thread is.
uint32_t site_now();
// The innermost operator that the thread runs. Null: none, or a function without a schema.
const Operation *operation_now();

// While this is on, the calling thread's accesses are not audited. Calls nest.
void leave_to_pytorch(bool on);

// Operators tell from now on what they access. With the GIL, as the next two.
void observe_operators();
// Those that make views of graphs' outputs tell of them too, until stop_observing().
void observe_views();
void stop_observing();

} // namespace esper::auditing
