// What the filters of pools threw while the core asked them.
#pragma once

namespace esper {

// Rethrows what a filter threw in the calling thread's last malloc, if one did.
void rethrow_filter_failure();

} // namespace esper
