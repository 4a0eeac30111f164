// Converts PyTorch's streams for the core.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include "../../esper_alloc.h"

namespace esper
{

// PyTorch's stream id is 0 for a device's default stream, odd for a stream of its pools, and
// otherwise the address of an external stream. Default and pool streams live as long as the
// process; an external one may be destroyed by its owner. (cudaStreamLegacy, handle 1, as an
// external stream is the default stream.)
inline bool is_immortal(c10::StreamId id)
{
  return id == 0 || (id & 1) != 0;
}

inline esper_stream make_stream(cudaStream_t handle, c10::DeviceIndex device, bool immortal)
{
  constexpr unsigned flags[] = {0, ESPER_STREAM_IMMORTAL};
  return {handle, device, flags[immortal]};
}

inline esper_stream to_esper(c10::cuda::CUDAStream stream)
{
  // stream() is slow even for the default stream, whose handle is null.
  cudaStream_t handle = stream.id() == 0 ? nullptr : stream.stream();
  return make_stream(handle, stream.device_index(), is_immortal(stream.id()));
}

// For a bare handle. It is known to be a pool stream only if it is the current stream and that is
// one.
inline esper_stream to_esper(cudaStream_t handle, c10::DeviceIndex device)
{
  const auto current = c10::cuda::getCurrentCUDAStream(device);
  if (current.stream() == handle) {
    return to_esper(current);
  }
  return make_stream(handle, device, handle == nullptr || handle == cudaStreamLegacy);
}

} // namespace esper
