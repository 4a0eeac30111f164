// Memory that other processes open (torch.multiprocessing).
#pragma once

namespace esper
{

// Segments of which nothing is live any more are no longer shared: whoever
// opened them has closed them before the last of their memory was freed, as
// torch.multiprocessing counts. They may be given back from now on. True: there
// were some.
bool forget_unshared();

} // namespace esper
