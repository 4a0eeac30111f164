// Memory that other processes can open (torch.multiprocessing).
#pragma once

namespace esper
{

// Ends the sharing of segments and pages without live memory, so that they may go back to the
// driver. Their consumers have closed them, because torch.multiprocessing keeps the memory live
// until then. True: there were some.
bool forget_unshared();

} // namespace esper
