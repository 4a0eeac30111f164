/* cuda.c: the CUDA driver behind device.h.
 *
 * libcuda is opened at run time: a machine without a GPU can load us, and the
 * toolkit's stub library is never linked by mistake. Each call of device.h is
 * made in a `scope`, which makes the device's primary context current and
 * takes the thread out of the way of other people's captures, and puts both
 * back as they were. */
#include "cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../core/base/error.h"
#include "cuda_api.h"
#include "handoff.h"

/* Whether pages can be made so that another process can open them. The driver's word is
 * believed when it has made one. */
enum sharing { SHARING_IS_REFUSED, SHARING_IS_SAID, SHARING_IS_SEEN };

typedef struct cuda_device {
  CUdevice handle;
  _Atomic(CUcontext) context; /* the primary one, retained at first use */
  bool virtual_memory;
  bool rdma; /* pages can be made readable by network cards */
  _Atomic(enum sharing) sharing;
} cuda_device;

static cuda_api api;
static cuda_device *devices; /* written once, by driver_load */
static int device_count;
static int driver_version;
static pthread_mutex_t retain_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool forked;

/* ---- errors ------------------------------------------------------------ */

/* The thread's last failure. Put into words only when somebody asks: "not
 * ready" is an everyday answer. */
static _Thread_local struct {
  const char *function; /* NULL: text is all there is to say */
  CUresult result;
  char text[320];
} failure;

static esper_status status_of(CUresult result)
{
  switch (result) {
  case CUDA_SUCCESS: return ESPER_OK;
  case CUDA_ERROR_NOT_READY: return ESPER_NOT_READY;
  case CUDA_ERROR_OUT_OF_MEMORY: return ESPER_OUT_OF_MEMORY;
  case CUDA_ERROR_DEINITIALIZED:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED: return ESPER_SHUT_DOWN;
  case CUDA_ERROR_NOT_SUPPORTED: return ESPER_UNSUPPORTED;
  default:
    return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                   result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
               ? ESPER_CAPTURING
               : ESPER_DEVICE_ERROR;
  }
}

static inline esper_status check(const char *function, CUresult result)
{
  if (result == CUDA_SUCCESS)
    return ESPER_OK;
  failure.function = function;
  failure.result = result;
  return status_of(result);
}

/* check(name, name(...)), so that no message names the wrong function. */
#define CALL(name, ...) check(#name, api.name(__VA_ARGS__))

__attribute__((format(printf, 2, 3))) static esper_status refuse(esper_status status,
                                                                 const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  failure.function = NULL;
  vsnprintf(failure.text, sizeof failure.text, format, arguments);
  va_end(arguments);
  return status;
}

static const char *cuda_last_error(void *self)
{
  (void)self;
  if (failure.function) {
    const char *name = NULL, *meaning = NULL;
    api.cuGetErrorName(failure.result, &name);
    api.cuGetErrorString(failure.result, &meaning);
    if (name)
      snprintf(failure.text, sizeof failure.text, "%s: %s (%s)", failure.function, name,
               meaning ? meaning : "no description");
    else
      snprintf(failure.text, sizeof failure.text, "%s: CUDA error %d", failure.function,
               failure.result);
    failure.function = NULL;
  }
  return failure.text[0] ? failure.text : "no error";
}

/* ---- scopes ------------------------------------------------------------ */

typedef enum scope_mode {
  SCOPE_PLAIN,  /* only the context: calls that no capture minds */
  SCOPE_RELAXED /* calls that a capture going on elsewhere would be broken by */
} scope_mode;

typedef struct scope {
  cuda_device *device;
  CUcontext context;
  bool pushed;
  bool relaxed;
  CUstreamCaptureMode mode; /* the thread's own, while relaxed */
} scope;

static esper_status scope_leave(scope *s, esper_status status)
{
  if (s->pushed)
    api.cuCtxPopCurrent(&s->context);
  if (s->relaxed)
    api.cuThreadExchangeStreamCaptureMode(&s->mode);
  return status;
}

static esper_status device_retain(cuda_device *device, CUcontext *context)
{
  *context = atomic_load_explicit(&device->context, memory_order_acquire);
  if (*context)
    return ESPER_OK;
  pthread_mutex_lock(&retain_lock);
  esper_status status = ESPER_OK;
  *context = atomic_load_explicit(&device->context, memory_order_relaxed);
  if (!*context) {
    /* Making a context allocates. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    status = CALL(cuThreadExchangeStreamCaptureMode, &mode);
    if (status == ESPER_OK) {
      status = CALL(cuDevicePrimaryCtxRetain, context, device->handle);
      api.cuThreadExchangeStreamCaptureMode(&mode);
    }
    if (status == ESPER_OK)
      atomic_store_explicit(&device->context, *context, memory_order_release);
  }
  pthread_mutex_unlock(&retain_lock);
  return status;
}

static esper_status refuse_if_forked(void)
{
  if (!atomic_load_explicit(&forked, memory_order_relaxed))
    return ESPER_OK;
  return refuse(ESPER_DEVICE_ERROR,
                "this process was forked after CUDA was initialised in its parent, and CUDA "
                "does not work in such a child; start workers with the 'spawn' or "
                "'forkserver' method of multiprocessing");
}

static esper_status device_find(int device, cuda_device **found)
{
  if (device < 0 || device >= device_count)
    return refuse(ESPER_INVALID, "there is no CUDA device %d; this process sees %d", device,
                  device_count);
  *found = &devices[device];
  return refuse_if_forked();
}

static esper_status scope_enter(scope *s, int device, scope_mode mode)
{
  *s = (scope){0};
  CUcontext current = NULL;
  esper_status status = device_find(device, &s->device);
  if (status == ESPER_OK)
    status = device_retain(s->device, &s->context);
  if (status == ESPER_OK)
    status = CALL(cuCtxGetCurrent, &current);
  if (status == ESPER_OK && mode == SCOPE_RELAXED) {
    s->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    status = CALL(cuThreadExchangeStreamCaptureMode, &s->mode);
    s->relaxed = status == ESPER_OK;
  }
  if (status == ESPER_OK && current != s->context) {
    status = CALL(cuCtxPushCurrent, s->context);
    s->pushed = status == ESPER_OK;
  }
  return status == ESPER_OK ? ESPER_OK : scope_leave(s, status);
}

/* The rest of a function that makes one driver call in a scope. */
#define RETURN_SCOPED(device, mode, call)                \
  do {                                                   \
    scope s;                                             \
    esper_status status = scope_enter(&s, device, mode); \
    if (status != ESPER_OK)                              \
      return status;                                     \
    return scope_leave(&s, call);                        \
  } while (0)

/* A thread that has no context at all may be refused even a handle that names
 * its own. */
static bool lacks_context(esper_status status)
{
  return status == ESPER_DEVICE_ERROR && failure.result == CUDA_ERROR_INVALID_CONTEXT;
}

/* The same for a short call on a stream, which the scope would make half as
 * long again: a handle above 2 names its context itself, so the scope is
 * entered only for the others, and where the thread has no context. */
#define RETURN_ON_STREAM(device, stream, call) \
  do {                                         \
    if ((uintptr_t)(stream) > 2) {             \
      esper_status named = refuse_if_forked(); \
      if (named == ESPER_OK)                   \
        named = call;                          \
      if (!lacks_context(named))               \
        return named;                          \
    }                                          \
    RETURN_SCOPED(device, SCOPE_PLAIN, call);  \
  } while (0)

/* ---- devices ----------------------------------------------------------- */

static esper_status cuda_device_count(void *self, int *count)
{
  (void)self;
  *count = device_count;
  return ESPER_OK;
}

static esper_status cuda_memory_info(void *self, int device, size_t *free, size_t *total)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuMemGetInfo, free, total));
}

static esper_status cuda_memory_total(void *self, int device, size_t *total)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuDeviceTotalMem, total, devices[device].handle));
}

static esper_status cuda_device_synchronize(void *self, int device)
{
  (void)self;
  scope s;
  esper_status status = scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  return scope_leave(&s, check("cuCtxSynchronize", api.cuCtxSynchronize()));
}

/* ---- classic segments -------------------------------------------------- */

static esper_status cuda_memory_alloc(void *self, int device, size_t size, uintptr_t *address)
{
  (void)self;
  scope s;
  esper_status status = scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUdeviceptr pointer = 0;
  status = CALL(cuMemAlloc, &pointer, size);
  if (status == ESPER_OK)
    *address = (uintptr_t)pointer;
  return scope_leave(&s, status);
}

static esper_status cuda_memory_free(void *self, int device, uintptr_t address)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuMemFree, address));
}

/* ---- mapped segments --------------------------------------------------- */

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

static esper_status scope_enter_virtual(scope *s, int device)
{
  esper_status status = scope_enter(s, device, SCOPE_RELAXED);
  if (status != ESPER_OK || s->device->virtual_memory)
    return status;
  return scope_leave(s, refuse(ESPER_UNSUPPORTED, "CUDA device %d has no virtual memory management",
                               device));
}

static esper_status cuda_page_granularity(void *self, int device, size_t *bytes)
{
  (void)self;
  *bytes = 0;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUmemAllocationProp properties = page_properties(s.device);
  return scope_leave(&s, CALL(cuMemGetAllocationGranularity, bytes, &properties,
                              CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

static esper_status cuda_range_reserve(void *self, int device, size_t size, uintptr_t *address)
{
  (void)self;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUdeviceptr pointer = 0;
  status = CALL(cuMemAddressReserve, &pointer, size, 0, 0, 0);
  if (status == ESPER_OK)
    *address = (uintptr_t)pointer;
  return scope_leave(&s, status);
}

static esper_status cuda_range_free(void *self, int device, uintptr_t address, size_t size)
{
  (void)self;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  return scope_leave(&s, CALL(cuMemAddressFree, address, size));
}

/* Whether a page may have been refused because it was to be shareable: some containers
 * and WSL have the attribute, and no such pages. */
static bool may_be_for_sharing(esper_status status)
{
  return status == ESPER_UNSUPPORTED ||
         (status == ESPER_DEVICE_ERROR && (failure.result == CUDA_ERROR_INVALID_VALUE ||
                                           failure.result == CUDA_ERROR_NOT_PERMITTED ||
                                           failure.result == CUDA_ERROR_OPERATING_SYSTEM));
}

/* Of the first page that was made. */
static void note_sharing(cuda_device *device, bool seen)
{
  enum sharing said = SHARING_IS_SAID;
  if (atomic_load_explicit(&device->sharing, memory_order_relaxed) == said)
    atomic_compare_exchange_strong(&device->sharing, &said,
                                   seen ? SHARING_IS_SEEN : SHARING_IS_REFUSED);
}

static esper_status cuda_page_create(void *self, int device, size_t size, uint64_t *page)
{
  (void)self;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
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
  return scope_leave(&s, status);
}

static esper_status cuda_page_release(void *self, int device, uint64_t page)
{
  (void)self;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  return scope_leave(&s, CALL(cuMemRelease, page));
}

static CUmemAccessDesc access_of(const cuda_device *device, bool allowed)
{
  return (CUmemAccessDesc){.location = page_location(device),
                           .flags = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                            : CU_MEM_ACCESS_FLAGS_PROT_NONE};
}

/* In one call mostly: each costs about as much as the mapping. */
static esper_status give_access(uintptr_t address, size_t size, const cuda_device *owner,
                                const int *peers, int count)
{
  enum { AT_ONCE = 16 };
  CUmemAccessDesc access[AT_ONCE] = {access_of(owner, true)};
  size_t given = 1;
  esper_status status = ESPER_OK;
  for (int i = 0; i < count && status == ESPER_OK; i++) {
    if (given == AT_ONCE) {
      status = CALL(cuMemSetAccess, address, size, access, given);
      given = 0;
    }
    access[given++] = access_of(&devices[peers[i]], true);
  }
  return status == ESPER_OK ? CALL(cuMemSetAccess, address, size, access, given) : status;
}

static esper_status cuda_page_map(void *self, int device, uintptr_t address, size_t size,
                                  uint64_t page, const int *peers, int count)
{
  (void)self;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  status = CALL(cuMemMap, address, size, 0, page, 0);
  if (status == ESPER_OK) {
    status = give_access(address, size, s.device, peers, count);
    if (status != ESPER_OK)
      api.cuMemUnmap(address, size);
  }
  return scope_leave(&s, status);
}

static esper_status cuda_page_unmap(void *self, int device, uintptr_t address, size_t size)
{
  (void)self;
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  return scope_leave(&s, CALL(cuMemUnmap, address, size));
}

static esper_status cuda_page_access(void *self, int device, uintptr_t address, size_t size,
                                     int peer, int allowed)
{
  (void)self;
  scope s;
  cuda_device *other;
  esper_status status = device_find(peer, &other);
  if (status == ESPER_OK)
    status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  CUmemAccessDesc access = access_of(other, allowed);
  return scope_leave(&s, CALL(cuMemSetAccess, address, size, &access, 1));
}

static esper_status cuda_peer_check(void *self, int device, int peer)
{
  (void)self;
  cuda_device *owner, *other;
  int can = 0;
  esper_status status = device_find(device, &owner);
  if (status == ESPER_OK)
    status = device_find(peer, &other);
  if (status == ESPER_OK && !api.cuDeviceCanAccessPeer)
    return refuse(ESPER_UNSUPPORTED, "cuDeviceCanAccessPeer is missing: update the NVIDIA driver");
  if (status == ESPER_OK)
    status = CALL(cuDeviceCanAccessPeer, &can, other->handle, owner->handle);
  if (status == ESPER_OK && !can)
    return refuse(ESPER_UNSUPPORTED, "CUDA device %d cannot access the memory of device %d", peer,
                  device);
  return status;
}

/* ---- pages of several processes ------------------------------------------ */

static esper_status export_file(int device, uint64_t page, int *file)
{
  scope s;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  if (atomic_load(&s.device->sharing) == SHARING_IS_REFUSED)
    return scope_leave(&s, refuse(ESPER_UNSUPPORTED,
                                  "the driver makes no pages on CUDA device %d that can be "
                                  "shared",
                                  device));
  *file = -1;
  return scope_leave(&s, CALL(cuMemExportToShareableHandle, file, page,
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

static int open_page(int device, uint64_t page)
{
  int file = -1;
  return export_file(device, page, &file) == ESPER_OK ? file : -1;
}

static esper_status cuda_page_export(void *self, int device, uint64_t page, esper_page_name *name)
{
  (void)self;
  int file;
  handoff_name offered;
  /* Once now: whoever asks for it later has nobody to complain to. */
  esper_status status = export_file(device, page, &file);
  if (status != ESPER_OK)
    return status;
  close(file);
  int error = handoff_offer(open_page, device, page, &offered);
  if (error)
    return refuse(ESPER_UNSUPPORTED, "a page cannot be offered to other processes: %s",
                  strerror(error));
  *name =
      (esper_page_name){.process = offered.process, .key = offered.key, .number = offered.number};
  return ESPER_OK;
}

static esper_status cuda_page_unexport(void *self, int device, const esper_page_name *name)
{
  (void)self, (void)device;
  handoff_withdraw(name->number);
  return ESPER_OK;
}

static const char *why_not_taken(int error)
{
  switch (error) {
  case ECONNREFUSED: return "it has ended, or runs in a network of its own (another container?)";
  case ECONNRESET: return "it ended when it was asked";
  case EACCES: return "it belongs to another user";
  case ENOENT: return "the memory was freed there";
  case EIO: return "the driver refused there (has it a file descriptor left?)";
  case EMFILE: return "this process has no file descriptor left (raise the limit: ulimit -n)";
  case ETIMEDOUT: return "it does not answer (is it stopped, or in a debugger?)";
  default: return strerror(error);
  }
}

static esper_status take_file(const esper_page_name *name, int *file)
{
  handoff_name offered = {name->process, name->key, name->number};
  int error = handoff_take(&offered, file);
  if (!error)
    return ESPER_OK;
  return refuse(ESPER_INVALID, "process %llu, which shared this memory, does not hand it out: %s",
                (unsigned long long)name->process, why_not_taken(error));
}

static esper_status cuda_page_import(void *self, int device, const esper_page_name *name,
                                     uint64_t *page)
{
  (void)self;
  int file;
  scope s;
  CUmemGenericAllocationHandle handle = 0;
  esper_status status = scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  if (!api.cuMemImportFromShareableHandle)
    return scope_leave(&s, refuse(ESPER_UNSUPPORTED, "cuMemImportFromShareableHandle is missing: "
                                                     "update the NVIDIA driver"));
  status = take_file(name, &file);
  if (status != ESPER_OK)
    return scope_leave(&s, status);
  status = CALL(cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)file,
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(file);
  if (status == ESPER_OK)
    *page = handle;
  return scope_leave(&s, status);
}

/* ---- streams ----------------------------------------------------------- */

static esper_status id_of(CUstream stream, uint64_t *id)
{
  unsigned long long value = 0;
  esper_status status = CALL(cuStreamGetId, stream, &value);
  if (status == ESPER_OK)
    *id = value;
  return status;
}

static esper_status cuda_stream_id(void *self, int device, void *stream, uint64_t *id)
{
  (void)self;
  if (!api.cuStreamGetId)
    return refuse(ESPER_UNSUPPORTED,
                  "cuStreamGetId is missing: it came with CUDA 12.0, this driver is %d.%d",
                  driver_version / 1000, driver_version % 1000 / 10);
  RETURN_ON_STREAM(device, stream, id_of(stream, id));
}

static esper_status capture_of(CUstream stream, uint64_t *capture)
{
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  esper_status status = CALL(cuStreamIsCapturing, stream, &state);
  if (status == ESPER_OK && state != CU_STREAM_CAPTURE_STATUS_NONE)
    status = CALL(cuStreamGetCaptureInfo, stream, &state, &id, NULL, NULL, NULL);
  if (status != ESPER_OK)
    return status;
  /* An invalidated capture has no id any more, yet the stream is not free. */
  if (state == CU_STREAM_CAPTURE_STATUS_NONE)
    *capture = 0;
  else
    *capture = state == CU_STREAM_CAPTURE_STATUS_ACTIVE && id ? id : ESPER_CAPTURE_INVALID;
  return ESPER_OK;
}

static esper_status cuda_stream_capture(void *self, int device, void *stream, uint64_t *capture)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, capture_of(stream, capture));
}

static esper_status cuda_stream_create(void *self, int device, void **stream)
{
  (void)self;
  scope s;
  esper_status status = scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUstream created = NULL;
  status = CALL(cuStreamCreate, &created, CU_STREAM_NON_BLOCKING);
  if (status == ESPER_OK)
    *stream = created;
  return scope_leave(&s, status);
}

static esper_status cuda_stream_destroy(void *self, int device, void *stream)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuStreamDestroy, stream));
}

static esper_status cuda_stream_wait(void *self, int device, void *stream, void *event)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuStreamWaitEvent, stream, event, 0));
}

/* ---- captures ---------------------------------------------------------- */

enum { TAILS = 64 }; /* nodes that a stream's next operation may depend on */

/* What is asked of captures here knows full dependencies only: of a capture with
 * others (programmatic launches) the driver will not speak in these terms. */
static esper_status scope_enter_capture(scope *s, int device)
{
  esper_status status = scope_enter(s, device, SCOPE_PLAIN);
  if (status != ESPER_OK || (api.cuStreamUpdateCaptureDependencies && api.cuGraphAddEmptyNode &&
                             api.cuGraphNodeGetDependencies))
    return status;
  return scope_leave(s, refuse(ESPER_UNSUPPORTED,
                               "this driver, %d.%d, does not show the graph of a capture",
                               driver_version / 1000, driver_version % 1000 / 10));
}

/* The driver's array lasts until the next call: it is copied at once. */
static esper_status tails_of(CUstream stream, uint64_t capture, CUgraph *graph, CUgraphNode *tails,
                             size_t *count)
{
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUgraphNode *found = NULL;
  cuuint64_t id = 0;
  *count = 0;
  esper_status status = CALL(cuStreamGetCaptureInfo, stream, &state, &id, graph, &found, count);
  if (status != ESPER_OK)
    return status;
  if (state != CU_STREAM_CAPTURE_STATUS_ACTIVE || id != capture)
    return refuse(ESPER_INVALID, "the stream is not in capture %llu any more",
                  (unsigned long long)capture);
  if (*count > TAILS)
    return refuse(ESPER_UNSUPPORTED, "the stream's next operation depends on %zu nodes", *count);
  for (size_t i = 0; i < *count; i++)
    tails[i] = found[i];
  return ESPER_OK;
}

/* As an empty node does that was added after the others. */
static bool is_after_others(CUgraphNode node, const CUgraphNode *tails, size_t count)
{
  CUgraphNode before[TAILS];
  size_t found = TAILS;
  if (api.cuGraphNodeGetDependencies(node, before, &found) != CUDA_SUCCESS)
    return false;
  for (size_t i = 0; i < count; i++) {
    size_t k = 0;
    while (k < found && before[k] != tails[i])
      k++;
    if (k == found && tails[i] != node)
      return false;
  }
  return true;
}

/* The empty node is added to the dependencies and replaces none: somebody may
 * just be capturing another operation. */
static esper_status point_after(CUstream stream, CUgraph graph, CUgraphNode *tails, size_t count,
                                CUgraphNode *node)
{
  *node = count ? tails[count - 1] : NULL;
  if (count < 2 || is_after_others(*node, tails, count))
    return ESPER_OK;
  CUgraphNode empty = NULL;
  esper_status status = CALL(cuGraphAddEmptyNode, &empty, graph, tails, count);
  if (status == ESPER_OK)
    status = CALL(cuStreamUpdateCaptureDependencies, stream, &empty, 1,
                  CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
  *node = empty;
  return status;
}

static esper_status cuda_capture_point(void *self, int device, void *stream, uint64_t capture,
                                       void **node)
{
  (void)self;
  CUgraph graph = NULL;
  CUgraphNode tails[TAILS], point = NULL;
  size_t count;
  scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  status = tails_of(stream, capture, &graph, tails, &count);
  if (status == ESPER_OK)
    status = point_after(stream, graph, tails, count, &point);
  if (status == ESPER_OK)
    *node = point;
  return scope_leave(&s, status);
}

static esper_status cuda_capture_depend(void *self, int device, void *stream, uint64_t capture,
                                        void *node)
{
  (void)self;
  CUgraph graph;
  CUgraphNode tails[TAILS], added = node;
  size_t count;
  scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  status = tails_of(stream, capture, &graph, tails, &count);
  if (status == ESPER_OK)
    status = CALL(cuStreamUpdateCaptureDependencies, stream, &added, 1,
                  CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
  return scope_leave(&s, status);
}

static esper_status cuda_capture_before(void *self, int device, void *stream, uint64_t capture,
                                        void *node, void **before, size_t *count)
{
  (void)self;
  CUgraph graph;
  CUgraphNode tails[TAILS];
  size_t found = *count, tail_count;
  scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  /* The graph of a capture that somebody ended or spoiled may be gone. */
  status = tails_of(stream, capture, &graph, tails, &tail_count);
  if (status == ESPER_OK)
    status = CALL(cuGraphNodeGetDependencies, node, (CUgraphNode *)before, &found);
  if (status == ESPER_OK && found >= *count)
    status = refuse(ESPER_UNSUPPORTED, "a node depends on %zu others, or more", found);
  if (status == ESPER_OK)
    *count = found;
  return scope_leave(&s, status);
}

/* ---- events ------------------------------------------------------------ */

static esper_status cuda_event_create(void *self, int device, void **event)
{
  (void)self;
  scope s;
  esper_status status = scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUevent created = NULL;
  status = CALL(cuEventCreate, &created, CU_EVENT_DISABLE_TIMING);
  if (status == ESPER_OK)
    *event = created;
  return scope_leave(&s, status);
}

static esper_status cuda_event_destroy(void *self, int device, void *event)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuEventDestroy, event));
}

static esper_status cuda_event_record(void *self, int device, void *event, void *stream)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuEventRecord, event, stream));
}

static esper_status cuda_event_record_all(void *self, int device, void *event)
{
  (void)self;
  if (!api.cuCtxRecordEvent)
    return refuse(ESPER_UNSUPPORTED,
                  "cuCtxRecordEvent is missing: it came with CUDA 12.5, this driver is %d.%d",
                  driver_version / 1000, driver_version % 1000 / 10);
  scope s;
  esper_status status = scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUcontext context = atomic_load_explicit(&s.device->context, memory_order_relaxed);
  return scope_leave(&s, CALL(cuCtxRecordEvent, context, event));
}

static esper_status cuda_event_query(void *self, int device, void *event)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuEventQuery, event));
}

static esper_status cuda_event_synchronize(void *self, int device, void *event)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuEventSynchronize, event));
}

/* ---- loading ----------------------------------------------------------- */

static const struct {
  const char *name;
  int version;
  bool required;
  size_t offset; /* in cuda_api */
} entry_points[] = {
#define REQUIRED true
#define OPTIONAL false
#define ENTRY(name, version, need, parameters) {#name, version, need, offsetof(cuda_api, name)},
    CUDA_ENTRY_POINTS(ENTRY)
#undef ENTRY
#undef REQUIRED
#undef OPTIONAL
};

enum { ENTRY_POINTS = sizeof entry_points / sizeof *entry_points };

static void **entry_slot(int index)
{
  return (void **)((char *)&api + entry_points[index].offset);
}

const char *esper_cuda_library(void)
{
  const char *name = getenv("ESPER_ALLOC_LIBCUDA");
  return name && *name ? name : "libcuda.so.1";
}

/* What fills the table: the newer shape where the driver has it, since only
 * that one knows the flags of CUDA 12. */
static void entry_find(void *library, int index)
{
  cuda_get_proc_address_v2 get_v2;
  cuda_get_proc_address_v1 get_v1;
  void **slot = entry_slot(index);
  CUdriverProcAddressQueryResult answer = 0;
  CUresult result = CUDA_ERROR_NOT_FOUND;
  /* By way of void *: ISO C has no cast from data to function pointers. */
  *(void **)&get_v2 = dlsym(library, "cuGetProcAddress_v2");
  *(void **)&get_v1 = dlsym(library, "cuGetProcAddress");
  if (get_v2)
    result = get_v2(entry_points[index].name, slot, entry_points[index].version,
                    CU_GET_PROC_ADDRESS_LEGACY_STREAM, &answer);
  else if (get_v1)
    result = get_v1(entry_points[index].name, slot, entry_points[index].version,
                    CU_GET_PROC_ADDRESS_LEGACY_STREAM);
  if (result != CUDA_SUCCESS)
    *slot = NULL;
}

static esper_status library_load(void)
{
  const char *name = esper_cuda_library();
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return refuse(ESPER_UNSUPPORTED,
                  "no CUDA driver: %s; install the NVIDIA driver, or make it visible here "
                  "(in a container: start it with its GPUs)",
                  dlerror());
  if (!dlsym(library, "cuGetProcAddress_v2") && !dlsym(library, "cuGetProcAddress"))
    return refuse(ESPER_UNSUPPORTED,
                  "%s has no cuGetProcAddress: it is older than CUDA 11.3; update the NVIDIA "
                  "driver",
                  name);
  const char *missing = NULL;
  for (int i = 0; i < ENTRY_POINTS; i++) {
    entry_find(library, i);
    if (!*entry_slot(i) && entry_points[i].required && !missing)
      missing = entry_points[i].name;
  }
  if (missing)
    return refuse(ESPER_UNSUPPORTED,
                  "%s has no %s: it is too old, or only the toolkit's stub; update the NVIDIA "
                  "driver",
                  name, missing);
  return ESPER_OK;
}

static bool attribute_of(CUdevice device, CUdevice_attribute attribute)
{
  int value = 0;
  return api.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

static bool virtual_memory_found(void)
{
  return api.cuMemGetAllocationGranularity && api.cuMemAddressReserve && api.cuMemAddressFree &&
         api.cuMemCreate && api.cuMemRelease && api.cuMemMap && api.cuMemUnmap &&
         api.cuMemSetAccess;
}

static void mark_forked(void)
{
  atomic_store(&forked, true);
}

static esper_status devices_find(void)
{
  int count = 0;
  esper_status status = CALL(cuInit, 0);
  if (status != ESPER_OK)
    return status;
  /* CUDA's state does not survive a fork from here on. */
  pthread_atfork(NULL, NULL, mark_forked);
  status = CALL(cuDriverGetVersion, &driver_version);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetCount, &count);
  if (status != ESPER_OK)
    return status;
  if (count == 0)
    return refuse(ESPER_UNSUPPORTED,
                  "the CUDA driver finds no device; is CUDA_VISIBLE_DEVICES empty?");
  devices = calloc((size_t)count, sizeof *devices);
  if (!devices)
    return refuse(ESPER_HOST_MEMORY, "no host memory for a table of %d devices", count);
  for (int i = 0; i < count && status == ESPER_OK; i++) {
    cuda_device *device = &devices[i];
    status = CALL(cuDeviceGet, &device->handle, i);
    if (status != ESPER_OK)
      break;
    device->virtual_memory =
        virtual_memory_found() &&
        attribute_of(device->handle, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    bool said = api.cuMemExportToShareableHandle && api.cuMemImportFromShareableHandle &&
                attribute_of(device->handle,
                             CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    atomic_init(&device->sharing, said ? SHARING_IS_SAID : SHARING_IS_REFUSED);
    device->rdma =
        attribute_of(device->handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  }
  if (status == ESPER_OK)
    device_count = count;
  return status;
}

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static esper_status load_status;
static char load_error[sizeof failure.text];

static void driver_load(void)
{
  load_status = library_load();
  if (load_status == ESPER_OK)
    load_status = devices_find();
  if (load_status == ESPER_OK)
    return;
  snprintf(load_error, sizeof load_error, "%s", cuda_last_error(NULL));
  /* No device, a stub, a driver that does not match its kernel module: for the
   * process it is all the same, CUDA is not to be had. */
  if (load_status != ESPER_HOST_MEMORY)
    load_status = ESPER_UNSUPPORTED;
}

static const esper_driver driver = {
    .name = "cuda",
    .device_count = cuda_device_count,
    .memory_info = cuda_memory_info,
    .memory_total = cuda_memory_total,
    .device_synchronize = cuda_device_synchronize,
    .memory_alloc = cuda_memory_alloc,
    .memory_free = cuda_memory_free,
    .page_granularity = cuda_page_granularity,
    .range_reserve = cuda_range_reserve,
    .range_free = cuda_range_free,
    .page_create = cuda_page_create,
    .page_release = cuda_page_release,
    .page_map = cuda_page_map,
    .page_unmap = cuda_page_unmap,
    .page_access = cuda_page_access,
    .peer_check = cuda_peer_check,
    .page_export = cuda_page_export,
    .page_unexport = cuda_page_unexport,
    .page_import = cuda_page_import,
    .stream_id = cuda_stream_id,
    .stream_capture = cuda_stream_capture,
    .capture_point = cuda_capture_point,
    .capture_depend = cuda_capture_depend,
    .capture_before = cuda_capture_before,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_wait = cuda_stream_wait,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_record_all = cuda_event_record_all,
    .event_query = cuda_event_query,
    .event_synchronize = cuda_event_synchronize,
    .last_error = cuda_last_error,
};

esper_status esper_cuda_driver(const esper_driver **result)
{
  pthread_once(&load_once, driver_load);
  if (load_status != ESPER_OK)
    return error_set(load_status, "%s", load_error);
  if (refuse_if_forked() != ESPER_OK)
    return error_set(ESPER_UNSUPPORTED, "%s", cuda_last_error(NULL));
  *result = &driver;
  return ESPER_OK;
}

/* ---- reports ----------------------------------------------------------- */

int esper_cuda_driver_version(void)
{
  pthread_once(&load_once, driver_load);
  return driver_version;
}

int esper_cuda_is_forked(void)
{
  return atomic_load_explicit(&forked, memory_order_relaxed);
}

int esper_cuda_get_entry_point(int index, esper_cuda_entry_point *entry)
{
  if (index < 0 || index >= ENTRY_POINTS)
    return 0;
  pthread_once(&load_once, driver_load);
  *entry = (esper_cuda_entry_point){.name = entry_points[index].name,
                                    .version = entry_points[index].version,
                                    .required = entry_points[index].required,
                                    .found = *entry_slot(index) != NULL};
  return 1;
}

esper_status esper_cuda_get_device(int index, esper_cuda_device *info)
{
  cuda_device *device = NULL;
  *info = (esper_cuda_device){0};
  esper_status status = device_find(index, &device);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetName, info->name, sizeof info->name, device->handle);
  if (status == ESPER_OK)
    status = CALL(cuDeviceTotalMem, &info->total_bytes, device->handle);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetAttribute, &info->compute_capability[0],
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device->handle);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetAttribute, &info->compute_capability[1],
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device->handle);
  info->virtual_memory = status == ESPER_OK && device->virtual_memory;
  return status == ESPER_OK ? ESPER_OK : error_set(status, "%s", cuda_last_error(NULL));
}

static esper_status current_device(CUdevice *handle)
{
  return CALL(cuCtxGetDevice, handle);
}

/* A thread that has no context is helped to any that is there already. */
static esper_status stream_context(CUstream stream, CUcontext *context)
{
  esper_status status = CALL(cuStreamGetCtx, stream, context);
  for (int i = 0; i < device_count && lacks_context(status); i++) {
    CUcontext any = atomic_load_explicit(&devices[i].context, memory_order_acquire);
    if (!any || api.cuCtxPushCurrent(any) != CUDA_SUCCESS)
      continue;
    status = CALL(cuStreamGetCtx, stream, context);
    api.cuCtxPopCurrent(&any);
  }
  return status;
}

static esper_status stream_device(CUstream stream, CUdevice *handle)
{
  if ((uintptr_t)stream <= 2)
    return current_device(handle);
  CUcontext context = NULL;
  esper_status status = stream_context(stream, &context);
  if (status == ESPER_OK)
    status = CALL(cuCtxPushCurrent, context);
  if (status != ESPER_OK)
    return status;
  status = current_device(handle);
  api.cuCtxPopCurrent(&context);
  return status;
}

esper_status esper_cuda_stream_device(void *stream, int *device)
{
  const esper_driver *loaded;
  CUdevice handle;
  esper_status status = esper_cuda_driver(&loaded);
  if (status != ESPER_OK)
    return status;
  status = stream_device(stream, &handle);
  if (status != ESPER_OK)
    return error_set(status, "%s", cuda_last_error(NULL));
  for (int i = 0; i < device_count; i++)
    if (devices[i].handle == handle) {
      *device = i;
      return ESPER_OK;
    }
  return error_set(ESPER_INVALID, "the stream's device is not one that this process sees");
}
