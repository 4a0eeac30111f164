// Who else has memory on a device, as the driver's management library (NVML)
// tells it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <vector>

namespace esper
{

struct process_memory {
  pid_t pid;    // in the namespace of the driver, which need not be ours
  size_t bytes; // 0: the driver does not tell
};

// Processes that compute on the device. Empty where NVML is not to be had.
std::vector<process_memory> processes_on(int device);

} // namespace esper
