/* pages.c: pages, and the address ranges that they are mapped into. */
#include "failure.h"
#include "functions.h"
#include "scope.h"

static CUmemLocation page_location(const cuda_device *device)
{
  return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->handle};
}

static CUmemAllocationProp page_properties(const cuda_device *device)
{
  return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .requestedHandleTypes =
                                   atomic_load(&device->sharing) == SHARING_IS_REFUSED
                                       ? CU_MEM_HANDLE_TYPE_NONE
                                       : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                               .location = page_location(device),
                               .allocFlags.gpuDirectRDMACapable = device->rdma};
}

esper_status cuda_page_granularity(void *self, int device, size_t *bytes)
{
  (void)self;
  *bytes = 0;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUmemAllocationProp properties = page_properties(s.device);
  return cuda_scope_leave(&s, CALL(cuMemGetAllocationGranularity, bytes, &properties,
                                   CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

esper_status cuda_range_reserve(void *self, int device, size_t size, uintptr_t *address)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUdeviceptr pointer = 0;
  status = CALL(cuMemAddressReserve, &pointer, size, 0, 0, 0);
  if (status == ESPER_OK)
    *address = (uintptr_t)pointer;
  return cuda_scope_leave(&s, status);
}

esper_status cuda_range_free(void *self, int device, uintptr_t address, size_t size)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  return cuda_scope_leave(&s, CALL(cuMemAddressFree, address, size));
}

/* Whether the driver may have refused a page because it was to be shareable. Some containers and
 * WSL claim to support such pages but do not. */
static bool may_be_for_sharing(esper_status status)
{
  return status == ESPER_UNSUPPORTED ||
         (status == ESPER_DEVICE_ERROR && (cuda_failed_with() == CUDA_ERROR_INVALID_VALUE ||
                                           cuda_failed_with() == CUDA_ERROR_NOT_PERMITTED ||
                                           cuda_failed_with() == CUDA_ERROR_OPERATING_SYSTEM));
}

/* Notes what the first page created has shown. */
static void note_sharing(cuda_device *device, bool seen)
{
  enum sharing said = SHARING_IS_SAID;
  if (atomic_load_explicit(&device->sharing, memory_order_relaxed) == said)
    atomic_compare_exchange_strong(&device->sharing, &said,
                                   seen ? SHARING_IS_SEEN : SHARING_IS_REFUSED);
}

esper_status cuda_page_create(void *self, int device, size_t size, uint64_t *page)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUmemAllocationProp properties = page_properties(s.device);
  CUmemGenericAllocationHandle handle = 0;
  status = CALL(cuMemCreate, &handle, size, &properties, 0);
  bool refused = properties.requestedHandleTypes && may_be_for_sharing(status);
  if (refused) {
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    status = CALL(cuMemCreate, &handle, size, &properties, 0);
  }
  if (status == ESPER_OK) {
    note_sharing(s.device, !refused);
    *page = handle;
  }
  return cuda_scope_leave(&s, status);
}

esper_status cuda_page_release(void *self, int device, uint64_t page)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  return cuda_scope_leave(&s, CALL(cuMemRelease, page));
}

static CUmemAccessDesc access_of(const cuda_device *device)
{
  return (CUmemAccessDesc){.location = page_location(device),
                           .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

/* Usually in one call, because each costs about as much as the mapping. */
static esper_status give_access(uintptr_t address, size_t size, const cuda_device *owner,
                                const int *peers, int count)
{
  enum { AT_ONCE = 16 };
  CUmemAccessDesc access[AT_ONCE] = {access_of(owner)};
  size_t given = 1;
  esper_status status = ESPER_OK;
  for (int i = 0; i < count && status == ESPER_OK; i++) {
    if (given == AT_ONCE) {
      status = CALL(cuMemSetAccess, address, size, access, given);
      given = 0;
    }
    access[given++] = access_of(&cuda_devices[peers[i]]);
  }
  return status == ESPER_OK ? CALL(cuMemSetAccess, address, size, access, given) : status;
}

esper_status cuda_page_map(void *self, int device, uintptr_t address, size_t size, uint64_t page,
                           const int *peers, int count)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  status = CALL(cuMemMap, address, size, 0, page, 0);
  if (status == ESPER_OK) {
    status = give_access(address, size, s.device, peers, count);
    if (status != ESPER_OK)
      libcuda.cuMemUnmap(address, size);
  }
  return cuda_scope_leave(&s, status);
}

esper_status cuda_page_unmap(void *self, int device, uintptr_t address, size_t size)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  return cuda_scope_leave(&s, CALL(cuMemUnmap, address, size));
}

esper_status cuda_page_access(void *self, int device, uintptr_t address, size_t size, int peer)
{
  (void)self;
  cuda_scope s;
  cuda_device *other;
  esper_status status = cuda_device_find(peer, &other);
  if (status == ESPER_OK)
    status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUmemAccessDesc access = access_of(other);
  return cuda_scope_leave(&s, CALL(cuMemSetAccess, address, size, &access, 1));
}

esper_status cuda_peer_check(void *self, int device, int peer)
{
  (void)self;
  cuda_device *owner, *other;
  int can = 0;
  esper_status status = cuda_device_find(device, &owner);
  if (status == ESPER_OK)
    status = cuda_device_find(peer, &other);
  if (status == ESPER_OK && !libcuda.cuDeviceCanAccessPeer)
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "cuDeviceCanAccessPeer is missing: update the NVIDIA driver");
  if (status == ESPER_OK)
    status = CALL(cuDeviceCanAccessPeer, &can, other->handle, owner->handle);
  if (status == ESPER_OK && !can)
    return cuda_refuse(ESPER_UNSUPPORTED, "CUDA device %d cannot access the memory of device %d",
                       peer, device);
  return status;
}
