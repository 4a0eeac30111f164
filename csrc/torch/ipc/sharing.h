// CUDA IPC: memory that other processes can open (torch.multiprocessing).
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <string>

#include "../../esper_alloc.h"

namespace esper
{

// A handle by which other processes can open the memory, and where in it `ptr` is.
c10::cuda::CUDACachingAllocator::ShareableHandle share_memory(esper_core *core, void *ptr);

// Opens what a handle names. It stays open until the last pointer to it is gone.
std::shared_ptr<void> open_memory(esper_core *core, const std::string &handle);

// Ends the sharing of segments and pages without live memory, so that they may go back to the
// driver. Their consumers have closed them, because torch.multiprocessing keeps the memory live
// until then. True: there were some.
bool forget_unshared();

} // namespace esper
