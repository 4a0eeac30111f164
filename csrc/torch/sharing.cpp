// torch.multiprocessing: a handle names a segment, as a string that travels to
// another process, which opens it. Both are esper_alloc there.
//
// Who may free what is PyTorch's business: the producer's memory stays live until
// every consumer has closed it. The segment around it is pinned meanwhile.
#include "sharing.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator.h"
#include "core_api.h"
#include "history.h"

namespace esper {
namespace {

// A handle is this, the kind of the segment, and what opens that kind.
constexpr std::string_view signature = "esper_alloc 1 ";
constexpr char classic = 'c'; // a cudaIpcMemHandle_t

// ---- given -----------------------------------------------------------------

struct Given {
  std::mutex mutex;
  std::map<void*, std::string> handles; // of pinned segments, by address
};

Given& given() {
  static auto* instance = new Given();
  return *instance;
}

std::string make_handle(void* segment) {
  cudaIpcMemHandle_t handle;
  const cudaError_t status = cudaIpcGetMemHandle(&handle, segment);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    TORCH_CHECK(
        false,
        "CUDA cannot share this memory with another process: ",
        cudaGetErrorString(status),
        ". esper_alloc shares memory of classic segments, which cudaMalloc gives;"
        " share a copy on the CPU, or turn expandable_segments off");
  }
  std::string text(signature);
  text.push_back(classic);
  text.append(reinterpret_cast<const char*>(&handle), sizeof handle);
  return text;
}

// ---- opened ----------------------------------------------------------------

// CUDA opens a handle once a process, so tensors of one segment share it. The
// last that goes closes it.
struct Opened {
  void* base = nullptr;
  c10::DeviceIndex device = 0;
  size_t users = 0;
};

struct Taken {
  std::mutex mutex;
  std::map<std::string, Opened> handles;
};

Taken& taken() {
  static auto* instance = new Taken();
  return *instance;
}

void* open_segment(const std::string& handle) {
  const std::string_view text(handle);
  TORCH_CHECK(
      text.substr(0, signature.size()) == signature,
      "this CUDA tensor was shared by a process that does not run on "
      "esper_alloc, or by another version of it: use the same allocator in "
      "every process that shares CUDA tensors (ESPER_ALLOC=1 reaches children)");
  const std::string_view rest = text.substr(signature.size());
  cudaIpcMemHandle_t opened;
  TORCH_CHECK(
      rest.size() == 1 + sizeof opened && rest[0] == classic,
      "this CUDA tensor was shared in a way that this version of esper_alloc "
      "does not know: use the same version in every process");
  std::memcpy(&opened, rest.data() + 1, sizeof opened);
  void* base = nullptr;
  C10_CUDA_CHECK(
      cudaIpcOpenMemHandle(&base, opened, cudaIpcMemLazyEnablePeerAccess));
  return base;
}

// A destructor is calling: at the process's end there may be no CUDA any more.
void close_segment(const std::string& handle) noexcept {
  try {
    std::lock_guard<std::mutex> lock(taken().mutex);
    const auto found = taken().handles.find(handle);
    if (found == taken().handles.end() || --found->second.users != 0) {
      return;
    }
    const Opened opened = found->second;
    taken().handles.erase(found);
    c10::cuda::CUDAGuard guard(opened.device);
    if (cudaIpcCloseMemHandle(opened.base) != cudaSuccess) {
      (void)cudaGetLastError();
    }
  } catch (const std::exception&) {
  }
}

} // namespace

bool forget_unshared() {
  esper_core* made = core_if_made();
  std::lock_guard<std::mutex> lock(given().mutex);
  bool some = false;
  auto& handles = given().handles;
  for (auto at = handles.begin(); made != nullptr && at != handles.end();) {
    // Not while anything in it is live.
    if (capi().unpin(made, at->first) == ESPER_NOT_READY) {
      ++at;
    } else {
      at = handles.erase(at);
      some = true;
    }
  }
  return some;
}

native::ShareableHandle Allocator::shareIpcHandle(void* ptr) {
  void* segment = nullptr;
  esper_block_info info{};
  std::lock_guard<std::mutex> lock(given().mutex);
  // Before it is pinned: a mapped segment is most of a stream's memory.
  TORCH_CHECK(
      capi().find_block(core(), ptr, &info) != ESPER_OK || info.mapped == 0,
      "CUDA cannot share this memory with another process: its pages are mapped. ",
      "esper_alloc shares memory of classic segments, which cudaMalloc gives;"
      " share a copy on the CPU, or turn expandable_segments off");
  TORCH_CHECK(
      capi().pin(core(), ptr, &segment) == ESPER_OK,
      "invalid device pointer: ",
      ptr,
      " is in no live block of esper_alloc");
  auto found = given().handles.find(segment);
  if (found == given().handles.end()) {
    try {
      found = given().handles.emplace(segment, make_handle(segment)).first;
    } catch (...) {
      given().handles.emplace(segment, std::string()); // pinned: to be forgotten
      throw;
    }
  } else if (found->second.empty()) {
    found->second = make_handle(segment);
  }
  return {
      static_cast<char*>(ptr) - static_cast<char*>(segment), found->second};
}

std::shared_ptr<void> Allocator::getIpcDevPtr(std::string handle) {
  void* base = nullptr;
  {
    std::lock_guard<std::mutex> lock(taken().mutex);
    auto found = taken().handles.find(handle);
    if (found == taken().handles.end()) {
      Opened opened;
      opened.device = c10::cuda::current_device();
      opened.base = open_segment(handle);
      found = taken().handles.emplace(handle, opened).first;
    }
    found->second.users++;
    base = found->second.base;
  }
  return {base, [handle](void*) { close_segment(handle); }};
}

} // namespace esper
