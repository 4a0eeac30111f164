// The processes that have memory on a device, according to the driver's management library (NVML).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <vector>

namespace esper
{

struct process_memory {
  pid_t pid;    // in the driver's namespace, perhaps not this process's
  size_t bytes; // 0: unknown
};

// The processes that compute on the device. Empty if NVML is not available.
std::vector<process_memory> processes_on(int device);

} // namespace esper
