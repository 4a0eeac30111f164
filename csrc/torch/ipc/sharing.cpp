// CUDA IPC, for torch.multiprocessing. A handle is a string that names memory: a classic segment,
// or the pages that a tensor lies on in a mapped one. It travels to another process that runs
// esper_alloc, too, which opens it.
//
// PyTorch keeps the producer's memory live until every consumer has closed it. Until then the
// segment or the pages are pinned.
#include "sharing.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/core_api.h"
#include "../base/gil.h"

namespace esper
{
namespace
{

namespace native = c10::cuda::CUDACachingAllocator;

// Keeps calls from disturbing another thread's capture.
using CaptureModeGuard = c10::cuda::CUDAStreamCaptureModeGuard;

// A handle consists of this, the kind of the segment, and what opens that kind.
constexpr std::string_view signature = "esper_alloc 1 ";
constexpr char classic = 'c'; // a cudaIpcMemHandle_t
constexpr char mapped = 'p';  // one esper_page_name for each page

// ---- given -----------------------------------------------------------------

struct Given {
  std::mutex mutex;
  std::map<void *, std::string> handles; // of pinned segments, by address
};

Given &given()
{
  static auto *instance = new Given();
  return *instance;
}

std::string make_handle(void *segment)
{
  cudaIpcMemHandle_t handle;
  const CaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t status = cudaIpcGetMemHandle(&handle, segment);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    TORCH_CHECK(false,
                "CUDA cannot share this memory with another process: ", cudaGetErrorString(status),
                "; share a copy on the CPU");
  }
  std::string text(signature);
  text.push_back(classic);
  text.append(reinterpret_cast<const char *>(&handle), sizeof handle);
  return text;
}

native::ShareableHandle share_pages(esper_core *core, void *ptr)
{
  void *base = nullptr;
  esper_page_name *pages = nullptr;
  size_t count = 0;
  TORCH_CHECK(capi().share(core, ptr, &base, &pages, &count) == ESPER_OK,
              "CUDA cannot share this memory with another process: ", capi().last_error(),
              "; share a copy on the CPU, or use classic segments"
              " (ESPER_ALLOC_SEGMENTS=classic, or expandable_segments:False)");
  const std::unique_ptr<esper_page_name, decltype(&std::free)> owner(pages, &std::free);
  std::string text(signature);
  text.push_back(mapped);
  text.append(reinterpret_cast<const char *>(pages), count * sizeof *pages);
  return {static_cast<char *>(ptr) - static_cast<char *>(base), text};
}

// ---- opened ----------------------------------------------------------------

// CUDA opens a classic handle only once in a process, so tensors of one handle share it. The last
// one closes it.
struct Opened {
  void *base = nullptr;
  bool pages = false;
  c10::DeviceIndex device = 0;
  size_t users = 0;
};

struct Taken {
  std::mutex mutex;
  std::map<std::string, Opened> handles;
};

Taken &taken()
{
  static auto *instance = new Taken();
  return *instance;
}

void *open_segment(std::string_view rest)
{
  cudaIpcMemHandle_t opened;
  std::memcpy(&opened, rest.data(), sizeof opened);
  void *base = nullptr;
  const CaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  C10_CUDA_CHECK(cudaIpcOpenMemHandle(&base, opened, cudaIpcMemLazyEnablePeerAccess));
  return base;
}

void *open_pages(esper_core *core, std::string_view rest, c10::DeviceIndex device)
{
  std::vector<esper_page_name> pages(rest.size() / sizeof(esper_page_name));
  std::memcpy(pages.data(), rest.data(), rest.size());
  void *base = nullptr;
  TORCH_CHECK(capi().open_shared(core, device, pages.data(), pages.size(), &base) == ESPER_OK,
              "this CUDA tensor cannot be opened here: ", capi().last_error());
  return base;
}

Opened open_handle(esper_core *core, const std::string &handle)
{
  const std::string_view text(handle);
  TORCH_CHECK(text.substr(0, signature.size()) == signature,
              "this CUDA tensor was shared by a process that does not run on "
              "esper_alloc, or by another version of it: use the same allocator in "
              "every process that shares CUDA tensors (ESPER_ALLOC=1 reaches children)");
  const std::string_view rest = text.substr(signature.size());
  const char kind = rest.empty() ? '\0' : rest[0];
  const size_t size = rest.empty() ? 0 : rest.size() - 1;
  TORCH_CHECK((kind == classic && size == sizeof(cudaIpcMemHandle_t)) ||
                  (kind == mapped && size != 0 && size % sizeof(esper_page_name) == 0),
              "this CUDA tensor was shared by another version of esper_alloc, in a way "
              "that this one cannot read: use the same version in every process");
  Opened opened;
  opened.pages = kind == mapped;
  opened.device = c10::cuda::current_device();
  opened.base =
      opened.pages ? open_pages(core, rest.substr(1), opened.device) : open_segment(rest.substr(1));
  return opened;
}

// Called by destructors. At the process's end CUDA may be gone.
void close_handle(const std::string &handle) noexcept
{
  if (core_if_made() == nullptr) {
    return; // it is the parent's, in a forked child, and another thread may have held the lock
  }
  try {
    const WithoutGil no_gil; // a thread that opens one holds the lock and may wait for a device
    std::unique_lock<std::mutex> lock(taken().mutex);
    const auto found = taken().handles.find(handle);
    if (found == taken().handles.end() || --found->second.users != 0) {
      return;
    }
    const Opened opened = found->second;
    taken().handles.erase(found);
    if (opened.pages) {
      lock.unlock(); // closing may wait for the device; the pages can be opened again meanwhile
      (void)capi().close_shared(core_if_made(), opened.base);
      return;
    }
    c10::cuda::CUDAGuard guard(opened.device);
    const CaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    if (cudaIpcCloseMemHandle(opened.base) != cudaSuccess) {
      (void)cudaGetLastError();
    }
  } catch (const std::exception &) {
  }
}

} // namespace

bool forget_unshared()
{
  esper_core *made = core_if_made();
  std::lock_guard<std::mutex> lock(given().mutex);
  bool some = false;
  auto &handles = given().handles;
  for (auto at = handles.begin(); made != nullptr && at != handles.end();) {
    // It still has live memory.
    if (capi().unpin(made, at->first) == ESPER_NOT_READY) {
      ++at;
    } else {
      at = handles.erase(at);
      some = true;
    }
  }
  return (made != nullptr && capi().unshare(made) > 0) || some;
}

native::ShareableHandle share_memory(esper_core *core, void *ptr)
{
  void *segment = nullptr;
  esper_block_info info{};
  if (capi().find_block(core, ptr, &info) == ESPER_OK && info.mapped != 0) {
    return share_pages(core, ptr);
  }
  TORCH_CHECK(
      info.fenced == 0,
      "memory with a fence cannot be shared with another process: send a copy on the CPU, or "
      "audit without fence=True");
  std::lock_guard<std::mutex> lock(given().mutex);
  TORCH_CHECK(capi().pin(core, ptr, &segment) == ESPER_OK, "invalid device pointer: ", ptr,
              " is in no live block of esper_alloc");
  auto found = given().handles.find(segment);
  if (found == given().handles.end()) {
    try {
      found = given().handles.emplace(segment, make_handle(segment)).first;
    } catch (...) {
      given().handles.emplace(segment, std::string()); // pinned, so forget_unshared() must find it
      throw;
    }
  } else if (found->second.empty()) {
    found->second = make_handle(segment);
  }
  return {static_cast<char *>(ptr) - static_cast<char *>(segment), found->second};
}

std::shared_ptr<void> open_memory(esper_core *core, const std::string &handle)
{
  void *base = nullptr;
  {
    const WithoutGil no_gil; // opening may wait for a device
    std::lock_guard<std::mutex> lock(taken().mutex);
    auto found = taken().handles.find(handle);
    if (found == taken().handles.end()) {
      found = taken().handles.emplace(handle, open_handle(core, handle)).first;
    }
    found->second.users++;
    base = found->second.base;
  }
  return {base, [handle](void *) { close_handle(handle); }};
}

} // namespace esper
