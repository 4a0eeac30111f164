// Private pools. Their methods are declared in ../base/allocator.h.
#pragma once

namespace esper
{

// Rethrows the exception that a pool's filter or allocator threw in the calling thread's last
// malloc, if any.
void rethrow_callback_failure();

} // namespace esper
