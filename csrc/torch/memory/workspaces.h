// cuBLAS's workspaces. PyTorch allocates one for a handle and a stream when they first need it, under
// the tag that is then in effect, and uses it for all later work.
#pragma once

#include <cstddef>

namespace esper
{

// Gives PyTorch others in place of those that sleep with these tags on `device` (-1: on all), so
// that work outside the tags goes on. The old ones stay allocated, because captured graphs may use
// them.
void replace_workspaces(const char *const *tags, std::size_t count, int device);

} // namespace esper
