/* fake_cuda.c: a libcuda without a GPU, for the tests of device/cuda/. It
 * keeps the rules that the driver layer has to live by: calls need a current
 * context, unsafe calls break a capture unless the thread is relaxed, entry
 * points come by version. Memory is numbers. */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/device/cuda/api.h"

extern fake_control fake;

enum { MAX_STACK = 16, MAX_SEGMENTS = 64, MAX_TAILS = 8 };
enum { MAX_PAGES = 1 << 14, FIRST_PAGE = 1000 };

struct CUctx_st {
  int device;
};
struct CUstream_st {
  CUcontext context;
  unsigned long long id;
  int status;
  unsigned long long capture;
  struct CUgraphNode_st *tails[MAX_TAILS];
  size_t tail_count;
};
struct CUgraphNode_st {
  struct CUgraphNode_st *before[MAX_TAILS];
  size_t before_count;
};
struct CUevent_st {
  CUcontext context;
  bool recorded, captured;
};

static struct CUctx_st contexts[MAX_DEVICES] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static struct CUstream_st legacy[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long long next_id = 100, next_address = 1ull << 32;
static struct {
  CUdeviceptr address;
  size_t size; /* 0: a free slot */
} segments[MAX_SEGMENTS];
static struct {
  size_t size;
  int references; /* its handle, and what maps it */
} pages[MAX_PAGES];
static struct {
  CUdeviceptr pointer;
  CUmemGenericAllocationHandle handle; /* 0: none */
} mappings[MAX_PAGES];
static bool finished = true;
static char fail_function[64];
static CUgraphNode shown_nodes[MAX_TAILS]; /* until the next call */
static int fail_in, fail_result;
static int in_vain; /* questions after which events complete; 0: they do not */

static _Thread_local CUcontext stack[MAX_STACK];
static _Thread_local int depth;
static _Thread_local int mode; /* global, as in a new thread */

static int number_from(const char *name, int otherwise)
{
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}

static int version(void)
{
  return number_from("FAKE_CUDA_VERSION", 13000);
}
static int device_count(void)
{
  return number_from("FAKE_CUDA_DEVICES", 2);
}

/* ---- every call starts here -------------------------------------------- */

enum { NEEDS_CONTEXT = 1, UNSAFE = 2 };

static struct {
  const char *name;
  int calls;
} counted[64];

static int *count_of(const char *name)
{
  int i = 0;
  while (counted[i].name && strcmp(counted[i].name, name) != 0)
    i++;
  counted[i].name = name;
  return &counted[i].calls;
}

static CUcontext current(void)
{
  return depth ? stack[depth - 1] : NULL;
}

static CUresult begin(const char *name, int needs)
{
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  ++*count_of(name);
  memset(shown_nodes, 0, sizeof shown_nodes);
  if (strcmp(fail_function, name) == 0 && --fail_in == 0) {
    fail_function[0] = 0;
    result = fail_result;
  } else if ((needs & NEEDS_CONTEXT) && !current()) {
    result = CUDA_ERROR_INVALID_CONTEXT;
  } else if ((needs & UNSAFE) && fake.capturing && mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
    fake.unsafe_calls++;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

#define BEGIN(needs)                           \
  do {                                         \
    CUresult refused = begin(__func__, needs); \
    if (refused != CUDA_SUCCESS)               \
      return refused;                          \
  } while (0)

static CUstream resolve(CUstream stream)
{
  return (uintptr_t)stream <= 2 ? &legacy[current()->device] : stream;
}

static unsigned long long address_of_locked(size_t size)
{
  unsigned long long address = next_address;
  next_address += (size + 0x1fffff) & ~(size_t)0x1fffff;
  return address;
}

static unsigned long long address_of(size_t size)
{
  pthread_mutex_lock(&lock);
  unsigned long long address = address_of_locked(size);
  pthread_mutex_unlock(&lock);
  return address;
}

/* ---- the driver -------------------------------------------------------- */

static CUresult cuInit(unsigned int flags)
{
  (void)flags;
  BEGIN(0);
  for (int i = 0; i < MAX_DEVICES; i++)
    legacy[i] = (struct CUstream_st){.context = &contexts[i], .id = 1 + (unsigned)i};
  return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static CUresult cuDriverGetVersion(int *result)
{
  BEGIN(0);
  *result = version();
  return CUDA_SUCCESS;
}

static CUresult cuGetErrorName(CUresult error, const char **name)
{
  *name = error == CUDA_ERROR_OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == CUDA_ERROR_NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
          : error == 719                        ? "CUDA_ERROR_LAUNCH_FAILED"
                                                : NULL;
  return *name ? CUDA_SUCCESS : 1;
}

static CUresult cuGetErrorString(CUresult error, const char **meaning)
{
  *meaning = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "as its name says";
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGetCount(int *count)
{
  BEGIN(0);
  *count = device_count();
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
  BEGIN(0);
  *device = ordinal;
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
  BEGIN(0);
  snprintf(name, (size_t)size, "Fake GPU %d", device);
  return CUDA_SUCCESS;
}

static CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
  (void)device;
  BEGIN(0);
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
           : attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
               ? !getenv("FAKE_CUDA_NO_VMM")
               : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
  return CUDA_SUCCESS;
}

static CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
  (void)device;
  BEGIN(0);
  *bytes = (size_t)1 << 34;
  return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
  BEGIN(UNSAFE);
  *context = &contexts[device];
  return CUDA_SUCCESS;
}

static CUresult cuCtxGetCurrent(CUcontext *context)
{
  BEGIN(0);
  *context = current();
  return CUDA_SUCCESS;
}

static CUresult cuCtxPushCurrent(CUcontext context)
{
  BEGIN(0);
  stack[depth++] = context;
  return CUDA_SUCCESS;
}

static CUresult cuCtxPopCurrent(CUcontext *context)
{
  BEGIN(NEEDS_CONTEXT);
  *context = stack[--depth];
  return CUDA_SUCCESS;
}

static CUresult cuCtxGetDevice(CUdevice *device)
{
  BEGIN(NEEDS_CONTEXT);
  *device = current()->device;
  return CUDA_SUCCESS;
}

static CUresult cuCtxSynchronize(void)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  return CUDA_SUCCESS;
}

static CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *exchanged)
{
  BEGIN(0);
  int before = mode;
  mode = *exchanged;
  *exchanged = before;
  return CUDA_SUCCESS;
}

static CUresult cuMemGetInfo(size_t *free, size_t *total)
{
  BEGIN(NEEDS_CONTEXT);
  *total = (size_t)1 << 34;
  *free = *total - fake.live_bytes;
  return CUDA_SUCCESS;
}

static CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  int slot = 0;
  pthread_mutex_lock(&lock);
  while (slot < MAX_SEGMENTS && segments[slot].size)
    slot++;
  bool room = slot < MAX_SEGMENTS && size <= ((size_t)1 << 34) - fake.live_bytes;
  if (room) {
    *pointer = segments[slot].address = address_of_locked(size);
    segments[slot].size = size;
    fake.live_bytes += size;
  }
  pthread_mutex_unlock(&lock);
  return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult cuMemFree(CUdeviceptr pointer)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  CUresult result = 1; /* CUDA_ERROR_INVALID_VALUE */
  pthread_mutex_lock(&lock);
  for (int slot = 0; slot < MAX_SEGMENTS && result != CUDA_SUCCESS; slot++)
    if (segments[slot].size && segments[slot].address == pointer) {
      fake.live_bytes -= segments[slot].size;
      segments[slot].size = 0;
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

static CUresult cuMemHostAlloc(void **memory, size_t size, unsigned int flags)
{
  (void)flags;
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  *memory = malloc(size);
  return *memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult cuMemFreeHost(void *memory)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  free(memory);
  return CUDA_SUCCESS;
}

/* Device memory has no contents here. */
static CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
  (void)to, (void)from, (void)size;
  BEGIN(NEEDS_CONTEXT);
  return resolve(stream)->status == CU_STREAM_CAPTURE_STATUS_NONE ? CUDA_SUCCESS
                                                                  : CUDA_ERROR_INVALID_VALUE;
}

static CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
  (void)to, (void)from, (void)size;
  BEGIN(NEEDS_CONTEXT);
  return resolve(stream)->status == CU_STREAM_CAPTURE_STATUS_NONE ? CUDA_SUCCESS
                                                                  : CUDA_ERROR_INVALID_VALUE;
}

static CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream)
{
  (void)to, (void)value, (void)size;
  BEGIN(NEEDS_CONTEXT);
  return resolve(stream)->status == CU_STREAM_CAPTURE_STATUS_NONE ? CUDA_SUCCESS
                                                                  : CUDA_ERROR_INVALID_VALUE;
}

static CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
  BEGIN(NEEDS_CONTEXT);
  *status = resolve(stream)->status;
  return CUDA_SUCCESS;
}

static CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status,
                                       cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                       size_t *count)
{
  BEGIN(NEEDS_CONTEXT);
  CUstream s = resolve(stream);
  *status = s->status;
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
    return CUDA_SUCCESS;
  *id = s->capture;
  if (graph)
    *graph = (CUgraph)s;
  if (nodes) {
    memcpy(shown_nodes, s->tails, sizeof s->tails);
    *nodes = shown_nodes;
    *count = s->tail_count;
  }
  return CUDA_SUCCESS;
}

static CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *before, size_t *count)
{
  BEGIN(NEEDS_CONTEXT);
  for (size_t i = 0; i < *count; i++)
    before[i] = i < node->before_count ? node->before[i] : NULL;
  if (*count > node->before_count)
    *count = node->before_count;
  return CUDA_SUCCESS;
}

static CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
  BEGIN(0);
  *context = stream->context;
  return CUDA_SUCCESS;
}

static CUresult cuStreamGetId(CUstream stream, unsigned long long *id)
{
  BEGIN(NEEDS_CONTEXT);
  *id = resolve(stream)->id;
  return CUDA_SUCCESS;
}

static CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  if (flags != CU_STREAM_NON_BLOCKING)
    return 1;
  *stream = calloc(1, sizeof **stream);
  **stream = (struct CUstream_st){.context = current(), .id = next_id++};
  return CUDA_SUCCESS;
}

static CUresult cuStreamDestroy(CUstream stream)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  free(stream);
  return CUDA_SUCCESS;
}

static CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
  (void)stream, (void)flags;
  BEGIN(NEEDS_CONTEXT);
  return event->captured ? 1 : CUDA_SUCCESS;
}

static CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  if (flags != CU_EVENT_DISABLE_TIMING)
    return 1;
  *event = calloc(1, sizeof **event);
  (*event)->context = current();
  return CUDA_SUCCESS;
}

static CUresult cuEventDestroy(CUevent event)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  free(event);
  return CUDA_SUCCESS;
}

static CUresult cuEventRecord(CUevent event, CUstream stream)
{
  BEGIN(NEEDS_CONTEXT);
  if (event->context != resolve(stream)->context)
    return 400; /* CUDA_ERROR_INVALID_HANDLE */
  event->recorded = true;
  event->captured = resolve(stream)->status != 0;
  return CUDA_SUCCESS;
}

static CUresult cuCtxRecordEvent(CUcontext context, CUevent event)
{
  BEGIN(0);
  if (event->context != context)
    return 400;
  event->recorded = true;
  return CUDA_SUCCESS;
}

static CUresult cuEventQuery(CUevent event)
{
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  if (event->captured)
    return 907; /* CUDA_ERROR_CAPTURED_EVENT */
  if (in_vain > 0 && --in_vain == 0)
    finished = true;
  else if (event->recorded && !finished)
    return CUDA_ERROR_NOT_READY;
  return CUDA_SUCCESS;
}

static CUresult cuEventSynchronize(CUevent event)
{
  (void)event;
  BEGIN(NEEDS_CONTEXT | UNSAFE);
  return CUDA_SUCCESS;
}

static CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option)
{
  (void)properties, (void)option;
  BEGIN(0);
  *bytes = (size_t)2 << 20;
  return CUDA_SUCCESS;
}

static CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment,
                                    CUdeviceptr wish, unsigned long long flags)
{
  (void)alignment, (void)wish, (void)flags;
  BEGIN(UNSAFE);
  *pointer = address_of(size);
  return CUDA_SUCCESS;
}

static CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size)
{
  (void)pointer, (void)size;
  BEGIN(UNSAFE);
  return CUDA_SUCCESS;
}

static CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *properties, unsigned long long flags)
{
  (void)flags;
  BEGIN(UNSAFE);
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return 1;
  if (properties->requestedHandleTypes && getenv("FAKE_CUDA_KEEPS"))
    return CUDA_ERROR_NOT_PERMITTED;
  int slot = 0;
  while (slot < MAX_PAGES && pages[slot].references)
    slot++;
  if (slot == MAX_PAGES || size > ((size_t)1 << 34) - fake.live_bytes)
    return CUDA_ERROR_OUT_OF_MEMORY;
  fake.live_bytes += size;
  pages[slot].size = size;
  pages[slot].references = 1;
  *handle = FIRST_PAGE + (unsigned)slot;
  return CUDA_SUCCESS;
}

/* A page is there until its handle is released and nothing maps it. */
static void leave_page(CUmemGenericAllocationHandle handle)
{
  int slot = (int)(handle - FIRST_PAGE);
  if (--pages[slot].references == 0) {
    fake.live_bytes -= pages[slot].size;
    pages[slot].size = 0; /* another process's page has the same number there */
  }
}

static CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
  BEGIN(UNSAFE);
  leave_page(handle);
  return CUDA_SUCCESS;
}

static CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags)
{
  (void)size, (void)offset, (void)flags;
  BEGIN(UNSAFE);
  int slot = 0;
  while (slot < MAX_PAGES && mappings[slot].handle)
    slot++;
  if (slot == MAX_PAGES)
    return CUDA_ERROR_OUT_OF_MEMORY;
  mappings[slot].pointer = pointer;
  mappings[slot].handle = handle;
  pages[handle - FIRST_PAGE].references++;
  fake.live_mappings++;
  return CUDA_SUCCESS;
}

/* The file says which page it is. */
static CUresult cuMemExportToShareableHandle(void *file, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type,
                                             unsigned long long flags)
{
  BEGIN(UNSAFE);
  int made = memfd_create("page", 0);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags || made < 0 ||
      getenv("FAKE_CUDA_KEEPS") || write(made, &handle, sizeof handle) != sizeof handle)
    return CUDA_ERROR_INVALID_VALUE;
  *(int *)file = made;
  return CUDA_SUCCESS;
}

static CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *file,
                                               CUmemAllocationHandleType type)
{
  BEGIN(UNSAFE);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
      pread((int)(intptr_t)file, handle, sizeof *handle, 0) != sizeof *handle)
    return CUDA_ERROR_INVALID_VALUE;
  pages[*handle - FIRST_PAGE].references++;
  return CUDA_SUCCESS;
}

static CUresult cuMemUnmap(CUdeviceptr pointer, size_t size)
{
  (void)size;
  BEGIN(UNSAFE);
  for (int slot = 0; slot < MAX_PAGES; slot++)
    if (mappings[slot].handle && mappings[slot].pointer == pointer) {
      leave_page(mappings[slot].handle);
      mappings[slot].handle = 0;
      break;
    }
  fake.live_mappings--;
  return CUDA_SUCCESS;
}

static CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                               size_t count)
{
  (void)pointer, (void)size;
  BEGIN(UNSAFE);
  for (size_t i = 0; i < count; i++)
    if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      return 1;
  for (size_t i = 0; i < count; i++)
    fake.access[access[i].location.id] = access[i].flags;
  return count ? CUDA_SUCCESS : 1;
}

static CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
  BEGIN(0);
  *can = fake.reach && device != peer;
  return CUDA_SUCCESS;
}

/* ---- looking up -------------------------------------------------------- */

static CUresult look_up(const char *symbol, void **pointer, int asked, cuuint64_t flags)
{
  static const struct {
    const char *name;
    int version;
    void (*function)(void);
  } entries[] = {
#define ENTRY(name, version, need, parameters) {#name, version, (void (*)(void))name},
      CUDA_ENTRY_POINTS(ENTRY)
#undef ENTRY
  };
  const char *lacks = getenv("FAKE_CUDA_LACKS");
  if (flags != CU_GET_PROC_ADDRESS_LEGACY_STREAM)
    fake.bad_requests++;
  *pointer = NULL;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
    if (strcmp(entries[i].name, symbol) == 0 && asked <= version() &&
        !(lacks && strcmp(lacks, symbol) == 0))
      *pointer = (void *)(uintptr_t)entries[i].function;
  return *pointer ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#ifdef FAKE_CUDA_OLD_GET
__attribute__((visibility("default"))) CUresult cuGetProcAddress(const char *symbol, void **pointer,
                                                                 int asked, cuuint64_t flags)
{
  return look_up(symbol, pointer, asked, flags);
}
#else
/* As the real one of 12.0 and later: a missing symbol is no error. */
__attribute__((visibility("default"))) CUresult
cuGetProcAddress_v2(const char *symbol, void **pointer, int asked, cuuint64_t flags,
                    CUdriverProcAddressQueryResult *answer)
{
  *answer = look_up(symbol, pointer, asked, flags) != CUDA_SUCCESS;
  return CUDA_SUCCESS;
}
#endif

/* ---- control ----------------------------------------------------------- */

static void fail(const char *function, int nth, int result)
{
  snprintf(fail_function, sizeof fail_function, "%s", function);
  fail_in = nth;
  fail_result = result;
}

static int calls(const char *function)
{
  return *count_of(function);
}

static void set_current(int device)
{
  depth = device < 0 ? 0 : 1;
  stack[0] = device < 0 ? NULL : &contexts[device];
}

static int current_device(void)
{
  return current() ? current()->device : -1;
}
static int get_depth(void)
{
  return depth;
}
static void set_mode(int value)
{
  mode = value;
}
static int get_mode(void)
{
  return mode;
}
static void *new_stream(int device)
{
  CUstream stream = calloc(1, sizeof *stream);
  *stream = (struct CUstream_st){.context = &contexts[device], .id = next_id++};
  return stream;
}

static void capture(void *stream, int status, unsigned long long id)
{
  ((CUstream)stream)->status = status;
  ((CUstream)stream)->capture = id;
}

static void *capture_node(void *stream)
{
  CUstream s = stream;
  CUgraphNode node = calloc(1, sizeof *node);
  memcpy(node->before, s->tails, s->tail_count * sizeof *s->tails);
  node->before_count = s->tail_count;
  s->tails[0] = node;
  s->tail_count = 1;
  return node;
}

static void depend(void *stream, void *node)
{
  CUstream s = stream;
  s->tails[s->tail_count++] = node;
}

static void finish(int on)
{
  finished = on;
  in_vain = 0;
}
static void finish_after(int queries)
{
  finished = false;
  in_vain = queries + 1;
}
__attribute__((visibility("default"))) fake_control fake = {
    fail,       calls,   set_current,  current_device, get_depth, set_mode,     get_mode,
    new_stream, capture, capture_node, depend,         finish,    finish_after, .reach = 1,
};
