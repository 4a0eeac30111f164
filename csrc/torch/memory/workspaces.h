// cuBLAS's workspaces. PyTorch allocates one when a handle first needs it on a stream, under the
// tag that is then in effect, and uses it for all later work there.
#pragma once

namespace esper
{

// Called after each sleep and wake. Takes those that sleep away from PyTorch, which allocates
// others where work outside the tags needs them. They stay allocated, because captured graphs may
// use them. PyTorch gets them back when they are awake and it has no other.
void update_workspaces();

} // namespace esper
