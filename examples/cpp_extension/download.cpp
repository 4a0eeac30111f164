/* A C++ extension that does work of its own on a side stream: it copies a tensor
 * to pinned CPU memory, and tells esper_alloc when it is done with the tensor.
 *
 * The torch dispatcher sees nothing of this work, so nobody else could tell. */
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/extension.h>

#include <esper_alloc.h>

namespace
{

/* Starts to copy `x`, a contiguous CUDA tensor, on the stream with that handle
 * (torch.cuda.Stream.cuda_stream). The result is complete when the stream has got
 * that far; `x` may be dropped at once. */
at::Tensor download(const at::Tensor &x, int64_t handle)
{
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "download: x must be a contiguous CUDA tensor");
  cudaStream_t side = reinterpret_cast<cudaStream_t>(handle);
  at::Tensor host = at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));

  /* Order: x is written before it is read here. */
  cudaStream_t current = c10::cuda::getCurrentCUDAStream(x.device().index());
  cudaEvent_t written;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(written, current));
  C10_CUDA_CHECK(cudaStreamWaitEvent(side, written, 0));
  C10_CUDA_CHECK(cudaEventDestroy(written));

  C10_CUDA_CHECK(cudaMemcpyAsync(host.data_ptr(), x.const_data_ptr(), x.nbytes(),
                                 cudaMemcpyDeviceToHost, side));

  /* Lifetime: right after the last read. Without this line the memory of x could
   * be handed out again while it is copied. */
  esper_status status = esper_alloc_record_use(x.const_data_ptr(), side);
  TORCH_CHECK(status == ESPER_OK, "download: ", esper_last_error());
  return host;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
  module.def("download", &download, "Copies a tensor to pinned memory on a stream");
}
