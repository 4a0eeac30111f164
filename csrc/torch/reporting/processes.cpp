#include "processes.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace esper
{
namespace
{

// The part of NVML that is used. Its header does not come with every toolkit.
struct process_info {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance;
  unsigned compute_instance;
};

constexpr int SUCCESS = 0;
constexpr int INSUFFICIENT_SIZE = 7;
constexpr unsigned long long NOT_AVAILABLE = ~0ull;

struct nvml {
  int (*init)() = nullptr;
  int (*device_by_bus)(const char *bus, void **device) = nullptr;
  int (*processes)(void *device, unsigned *count, process_info *infos) = nullptr;
};

template <typename Function>
bool find(void *library, const char *name, Function *function)
{
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// Opened once, when memory first runs out, and kept.
const nvml *library()
{
  static const nvml *const opened = []() -> const nvml * {
    static nvml found;
    void *file = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    const bool complete = file != nullptr && find(file, "nvmlInit_v2", &found.init) &&
                          find(file, "nvmlDeviceGetHandleByPciBusId_v2", &found.device_by_bus) &&
                          find(file, "nvmlDeviceGetComputeRunningProcesses_v3", &found.processes);
    return complete && found.init() == SUCCESS ? &found : nullptr;
  }();
  return opened;
}

// Finds NVML's device by its place on the bus, because CUDA_VISIBLE_DEVICES renumbers devices.
bool device_of(const nvml &with, int device, void **found)
{
  char bus[32];
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) {
    cudaGetLastError(); // or somebody else's next check would report it
    return false;
  }
  return with.device_by_bus(bus, found) == SUCCESS;
}

} // namespace

std::vector<process_memory> processes_on(int device)
{
  const nvml *with = library();
  void *handle = nullptr;
  if (with == nullptr || !device_of(*with, device, &handle)) {
    return {};
  }
  std::vector<process_info> infos(16);
  auto count = static_cast<unsigned>(infos.size());
  int status = with->processes(handle, &count, infos.data());
  if (status == INSUFFICIENT_SIZE) {
    infos.resize(count + 16); // some may have started since
    count = static_cast<unsigned>(infos.size());
    status = with->processes(handle, &count, infos.data());
  }
  std::vector<process_memory> found;
  for (unsigned i = 0; status == SUCCESS && i < count; i++) {
    const bool told = infos[i].used_bytes != NOT_AVAILABLE;
    found.push_back(
        {static_cast<pid_t>(infos[i].pid), told ? static_cast<size_t>(infos[i].used_bytes) : 0});
  }
  return found;
}

} // namespace esper
