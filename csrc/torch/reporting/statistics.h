// torch.cuda.memory_stats(): the core's figures in PyTorch's structure.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace esper
{

c10::CachingDeviceAllocator::DeviceStats device_stats(c10::DeviceIndex device);
void reset_accumulated_stats(c10::DeviceIndex device);
void reset_peak_stats(c10::DeviceIndex device);

} // namespace esper
