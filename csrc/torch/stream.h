// PyTorch's streams in the core's terms.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include "../esper_alloc.h"

namespace esper
{

// A stream id of PyTorch is 0 for a device's default stream, odd for a stream
// of its pools, and otherwise the address of an external stream. Default and
// pool streams live as long as the process; whoever made an external one may
// destroy it. (cudaStreamLegacy, handle 1, presented as external stream is
// the default stream again.)
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
  return make_stream(stream.stream(), stream.device_index(), is_immortal(stream.id()));
}

// For callers that hand over a bare handle: it is a pool stream only if it is
// the current one and that is.
inline esper_stream to_esper(cudaStream_t handle, c10::DeviceIndex device)
{
  const auto current = c10::cuda::getCurrentCUDAStream(device);
  if (current.stream() == handle) {
    return to_esper(current);
  }
  return make_stream(handle, device, handle == nullptr || handle == cudaStreamLegacy);
}

} // namespace esper
