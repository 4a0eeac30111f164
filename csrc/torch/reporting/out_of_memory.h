// When memory has run out: observers, and the exceptions.
#pragma once

#include <cstddef>

namespace esper
{

// Calls the observers and the profiler, then throws torch.OutOfMemoryError with the figures of this
// thread's last ESPER_OUT_OF_MEMORY.
[[noreturn]] void throw_out_of_memory();

// The same for ESPER_REJECTED.
[[noreturn]] void throw_rejection();

// Rejects sizes above an exabyte, which only come from arithmetic overflow.
void check_size(size_t size);

} // namespace esper
