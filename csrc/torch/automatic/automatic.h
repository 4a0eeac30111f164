// Automatic uses: every operator of PyTorch's notes which memory it uses on which stream, so that
// memory is safe without a mark.
//
// A note is made when the operator starts. Its work is not enqueued yet, but the caller holds the
// tensors until it is, and the use lasts until the free (esper_note_use).
//
// A program that never leaves the default streams pays nothing for operators. The callback is
// registered when there is another stream to run on, which the allocator's calls notice: at an
// allocation on such a stream, and at a free once PyTorch has made the streams of its pools, on a
// device that has memory: operators run on a stream of the device of their tensors. Until then no
// memory was reused too early, because nothing has been freed since the stream was made. But
// operators may have run on it, so memory that is live at that moment counts as used on all
// streams.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/python_headers.h>

#include "../base/watchers.h"

namespace esper
{

namespace detail
{
void begin_if_streams_exist() noexcept;
void begin_observing() noexcept;
void expect_memory_on(c10::DeviceIndex device) noexcept;
inline void expect_allocation(c10::DeviceIndex device, bool on_default_stream)
{
  if (is_watched_by(Watcher::STREAMS)) {
    on_default_stream ? expect_memory_on(device) : begin_observing();
  }
}
} // namespace detail

// Turns automatic uses on or off.
void set_automatic_uses(bool on);
// Whether operators note their inputs.
bool are_uses_noted();

// To be called before memory is allocated on the stream, and before memory is freed.
inline void expect_allocation(c10::cuda::CUDAStream stream)
{
  detail::expect_allocation(stream.device_index(), stream.id() == 0);
}
inline void expect_allocation(cudaStream_t stream, c10::DeviceIndex device)
{
  detail::expect_allocation(device, stream == nullptr || stream == cudaStreamLegacy);
}
inline void expect_free()
{
  if (is_watched_by(Watcher::STREAMS)) {
    detail::begin_if_streams_exist();
  }
}

// Python functions.
//
// automatic_uses(on): turns them on or off.
PyObject *automatic_uses(PyObject *module, PyObject *on);

// observe_now(): there is a stream that the allocator cannot notice.
PyObject *observe_now(PyObject *module, PyObject *none);

// is_observing() -> bool: whether operators note their inputs.
PyObject *is_observing(PyObject *module, PyObject *none);

// note_uses(values): notes uses of the tensors in a tuple or list, nested to any depth, on the
// current streams. Skips everything else. Does nothing unless is_observing().
PyObject *note_uses(PyObject *module, PyObject *values);

} // namespace esper
