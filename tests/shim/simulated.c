/* simulated.c: PyTorch's CUDA allocator without a GPU. Preloaded, it stands in
 * front of the CUDA runtime for the functions that PyTorch needs to have CUDA
 * tensors at all: devices, streams, events, copies; device memory is the simulated
 * device's, which is host memory. No kernel can be launched.
 *
 * esper_on_sim() makes the table of functions that the shim takes from _core into
 * one whose core lives on the simulated device: see simulated.py. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../csrc/device/sim/sim.h"
#include "../../csrc/python/capi.h"

#define SHOWN __attribute__((visibility("default")))

static sim *device_of_all;
static struct esper_capi table;
static esper_core *core;
static _Thread_local int current;
static _Thread_local cudaError_t last;

static sim *s(void)
{
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  void make(void);
  pthread_once(&once, make);
  return device_of_all;
}

/* An event on a stream that has nothing to do completes at once, as on a GPU. */
static void complete_if_alone(int device, void *stream)
{
  if (sim_pending(device_of_all, device, stream) == 1)
    sim_run_stream(device_of_all, device, stream, 1);
}

static void event_recorded(void *context, sim_call call, int device, void *stream)
{
  (void)context, (void)call;
  complete_if_alone(device, stream);
}

static void count_only(void *context, const char *report)
{
  (void)context, (void)report; /* sim_failures() counts */
}

void make(void)
{
  const char *capacity = getenv("SIM_CAPACITY_MB");
  /* Classic segments, as PyTorch's own allocator has by default, or mapped ones. */
  sim_options options = {.devices = 2,
                         .backed = 1,
                         .completion = SIM_WHEN_TOLD,
                         .oracle = getenv("SIM_HAS_ORACLE") ? SIM_ORACLE_KNOWN : SIM_ORACLE_OFF,
                         .virtual_memory = getenv("SIM_MAPS_PAGES") != NULL,
                         .capacity = (size_t)(capacity ? atoi(capacity) : 1024) << 20};
  device_of_all = sim_create(&options);
  sim_set_sharing(device_of_all, getenv("SIM_KEEPS_PAGES") == NULL);
  sim_after_call(device_of_all, SIM_CALL_event_record, event_recorded, NULL);
  if (options.oracle)
    sim_on_failure(device_of_all, count_only, NULL);
}

static cudaError_t fail(cudaError_t error)
{
  return last = error;
}

/* ---- for simulated.py ---------------------------------------------------- */

static int forked;
static const char *(*last_error)(void);

static void fork_child(void)
{
  forked = 1;
}

/* A forked child has none, as it has no CUDA. */
static esper_core *instance(void)
{
  const char *bytes = getenv("ESPER_ALLOC_ALLOWANCE"); /* or off */
  esper_config config = {.allowance = (size_t)128 << 20};
  if (bytes && *bytes)
    config.allowance = strcmp(bytes, "off") ? strtoull(bytes, NULL, 10) : ESPER_ALLOWANCE_OFF;
  const char *segments = getenv("ESPER_ALLOC_SEGMENTS");
  if (segments && !strcmp(segments, "classic"))
    config.segments = ESPER_SEGMENTS_CLASSIC;
  if (!core && table.core_create(sim_driver(s()), &config, &core) == ESPER_OK)
    table.alloc_black_box(core);
  return forked ? NULL : core;
}

static const char *why(void)
{
  return forked ? "this process was forked after CUDA was initialised in its parent" : last_error();
}

SHOWN const struct esper_capi *esper_on_sim(const struct esper_capi *original)
{
  table = *original;
  last_error = table.last_error;
  table.instance = instance;
  table.last_error = why;
  pthread_atfork(NULL, NULL, fork_child);
  return &table;
}

/* Work that touches nothing, which runs when sim_pass() lets time pass. */
SHOWN void sim_work(int device, void *stream)
{
  sim_kernel(s(), device, stream, NULL, 0, SIM_READ);
}
/* Work that writes or reads memory, and who owns it: for the oracle. */
SHOWN void sim_reach(int device, void *stream, const void *address, size_t size, int writes)
{
  sim_kernel(s(), device, stream, address, size, writes ? SIM_WRITE : SIM_READ);
}
SHOWN void sim_own(const void *address, size_t size, int device, void *stream)
{
  sim_owner_begin(s(), address, size, device, stream);
}
SHOWN void sim_disown(const void *address)
{
  sim_owner_end(s(), address);
}
SHOWN int sim_failed(void)
{
  return (int)sim_failures(s());
}
SHOWN void sim_pass(void)
{
  sim_run_all(s());
}
/* From now on no call of the core's succeeds, as after a kernel that failed. */
SHOWN void sim_break(void)
{
  sim_fail_calls_from(s(), SIM_CALL_any, 1, ESPER_DEVICE_ERROR);
}
/* The core's segments of the first device, and how much of them is live. */
SHOWN int core_segments(uintptr_t *addresses, size_t *sizes, int most)
{
  esper_snapshot snapshot;
  if (table.snapshot_take(instance(), 0, &snapshot) != ESPER_OK)
    return -1;
  int count = 0;
  for (; count < most && count < (int)snapshot.segment_count; count++) {
    addresses[count] = (uintptr_t)snapshot.segments[count].address;
    sizes[count] = snapshot.segments[count].size;
  }
  table.snapshot_free(&snapshot);
  return count;
}
SHOWN long long core_live(void)
{
  esper_stats stats;
  return table.get_stats(instance(), 0, &stats) == ESPER_OK
             ? (long long)stats.allocated_bytes[ESPER_ALL].current
             : -1;
}
/* Mappings of pages, and pages that have a name, of the first device. */
SHOWN int sim_mappings(void)
{
  sim_alive alive;
  sim_count_alive(s(), 0, &alive);
  return (int)alive.mappings;
}
SHOWN int sim_names(void)
{
  sim_alive alive;
  sim_count_alive(s(), 0, &alive);
  return (int)alive.names;
}
SHOWN int core_counters(int device, esper_counters *counters)
{
  return table.get_counters(instance(), device, counters);
}
SHOWN int core_memory_info(int device, size_t *free, size_t *total)
{
  return table.memory_info(instance(), device, free, total);
}
SHOWN int core_is_valid(void)
{
  return table.core_is_valid(instance());
}

/* Waits as the core waits while the host is held back, until sim_let_go(). 0: that did not come. */
static atomic_int is_held, may_go;
static void wait_until_let_go(void *went)
{
  atomic_store(&is_held, 1);
  for (int ms = 0; !atomic_load(&may_go) && ms < 20000; ms++)
    usleep(1000);
  *(int *)went = atomic_load(&may_go);
  atomic_store(&is_held, 0);
  atomic_store(&may_go, 0);
}
SHOWN int core_hold_back(void)
{
  esper_config config;
  int went = 0;
  table.get_config(instance(), &config);
  config.while_waiting(wait_until_let_go, &went);
  return went;
}
SHOWN int sim_is_held(void)
{
  return atomic_load(&is_held);
}
SHOWN void sim_let_go(void)
{
  atomic_store(&may_go, 1);
}
/* The same in a thread that Python does not know. */
static void *hold_back(void *went)
{
  *(int *)went = core_hold_back();
  return NULL;
}
SHOWN int core_hold_back_elsewhere(void)
{
  pthread_t thread;
  int went = 0;
  pthread_create(&thread, NULL, hold_back, &went);
  pthread_join(thread, NULL);
  return went;
}
/* The same when there is no Python any more; it is let go at once. */
static void hold_back_at_the_end(void)
{
  sim_let_go();
  printf("let go at the end: %d\n", core_hold_back());
  fflush(stdout);
}
SHOWN void core_hold_back_at_the_end(void)
{
  atexit(hold_back_at_the_end);
}

/* An access to addresses without pages. As on a GPU it is enqueued all the same, and whatever asks
 * later, on the same device, gets the error. */
static int faulted[2]; /* devices */
static int faults(const void *p, size_t n)
{
  int would = sim_would_fault(s(), p, n);
  faulted[current] |= would;
  return would;
}

/* ---- devices ------------------------------------------------------------- */

SHOWN cudaError_t cudaGetDeviceCount(int *count)
{
  *count = 2;
  return cudaSuccess;
}
SHOWN cudaError_t cudaGetDevice(int *device)
{
  *device = current;
  return cudaSuccess;
}
SHOWN cudaError_t cudaSetDevice(int device)
{
  if (device < 0 || device > 1)
    return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
SHOWN cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "simulated device %d", device);
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  size_t free;
  sim_driver(s())->memory_info(sim_driver(s())->self, device, &free, &p->totalGlobalMem);
  return cudaSuccess;
}
SHOWN cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int device)
{
  (void)a, (void)device;
  *value = 0;
  return cudaSuccess;
}
SHOWN cudaError_t cudaDriverGetVersion(int *version)
{
  *version = CUDART_VERSION;
  return cudaSuccess;
}
SHOWN cudaError_t cudaRuntimeGetVersion(int *version)
{
  *version = CUDART_VERSION;
  return cudaSuccess;
}
SHOWN cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b)
{
  *can = a != b;
  return cudaSuccess;
}
SHOWN cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
  static int enabled[2][2];
  (void)flags;
  if (enabled[current][peer])
    return fail(cudaErrorPeerAccessAlreadyEnabled);
  enabled[current][peer] = 1;
  return cudaSuccess;
}
SHOWN cudaError_t cudaDeviceSynchronize(void)
{
  sim_device_synchronize(s(), current);
  return faulted[current] ? fail(cudaErrorIllegalAddress) : cudaSuccess;
}
SHOWN cudaError_t cudaGetLastError(void)
{
  cudaError_t e = last;
  last = cudaSuccess;
  return e;
}
SHOWN cudaError_t cudaPeekAtLastError(void)
{
  return last;
}
static _Thread_local enum cudaStreamCaptureMode capture_mode; /* global */
SHOWN cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
  enum cudaStreamCaptureMode before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

/* ---- memory -------------------------------------------------------------- */

SHOWN cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
  sim_driver(s())->memory_info(sim_driver(s())->self, current, free, total);
  return cudaSuccess;
}
/* cudaFree may come while another device is current. */
static struct {
  void *ptr;
  int device;
} allocated[4096];
static pthread_mutex_t allocated_lock = PTHREAD_MUTEX_INITIALIZER;

/* Puts what is known of `before` in place of it; the device it was on. */
static int note(void *before, void *after)
{
  int device = current;
  pthread_mutex_lock(&allocated_lock);
  int i = 0;
  while (i < 4095 && allocated[i].ptr != before)
    i++;
  if (before)
    device = allocated[i].device;
  allocated[i].ptr = after;
  allocated[i].device = current;
  pthread_mutex_unlock(&allocated_lock);
  return device;
}

SHOWN cudaError_t cudaMalloc(void **ptr, size_t size)
{
  uintptr_t address = 0;
  if (sim_driver(s())->memory_alloc(sim_driver(s())->self, current, size, &address) != ESPER_OK)
    return fail(cudaErrorMemoryAllocation);
  *ptr = (void *)address;
  note(NULL, *ptr);
  return cudaSuccess;
}
SHOWN cudaError_t cudaFree(void *ptr)
{
  if (ptr)
    sim_driver(s())->memory_free(sim_driver(s())->self, note(ptr, NULL), (uintptr_t)ptr);
  return cudaSuccess;
}
SHOWN cudaError_t cudaHostAlloc(void **ptr, size_t size, unsigned flags)
{
  (void)flags;
  *ptr = malloc(size);
  return *ptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
/* Device memory that the current device may not access, as a copy there would. */
static int is_closed(const void *p, size_t n)
{
  if (!n || sim_may_access(s(), current, p, n))
    return 0;
  return sim_may_access(s(), 1 - current, p, n);
}

SHOWN cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind,
                                  cudaStream_t stream)
{
  (void)kind, (void)stream;
  if (faulted[current])
    return fail(cudaErrorIllegalAddress);
  if (faults(to, n) || faults(from, n))
    return cudaSuccess;
  if (is_closed(to, n) || is_closed(from, n))
    return fail(cudaErrorInvalidValue);
  memcpy(to, from, n);
  return cudaSuccess;
}
SHOWN cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
  return cudaMemcpyAsync(to, from, n, kind, 0);
}
SHOWN cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n,
                                      cudaStream_t stream)
{
  (void)a, (void)b, (void)stream;
  memcpy(to, from, n);
  return cudaSuccess;
}
SHOWN cudaError_t cudaMemsetAsync(void *ptr, int value, size_t n, cudaStream_t stream)
{
  (void)stream;
  if (faulted[current])
    return fail(cudaErrorIllegalAddress);
  if (!faults(ptr, n))
    memset(ptr, value, n);
  return cudaSuccess;
}
SHOWN cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *ptr)
{
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeDevice;
  a->device = current;
  a->devicePointer = (void *)ptr;
  return cudaSuccess;
}

/* Within one process, which is enough for the books that the shim keeps. */
static int opened;
SHOWN int sim_opened_handles(void)
{
  return opened;
}
SHOWN cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *ptr)
{
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &ptr, sizeof ptr);
  return cudaSuccess;
}
SHOWN cudaError_t cudaIpcOpenMemHandle(void **ptr, cudaIpcMemHandle_t handle, unsigned flags)
{
  if (flags != cudaIpcMemLazyEnablePeerAccess)
    return fail(cudaErrorInvalidValue);
  memcpy(ptr, &handle, sizeof *ptr);
  opened++;
  return cudaSuccess;
}
SHOWN cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
SHOWN cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event)
{
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &event, sizeof event);
  return cudaSuccess;
}
SHOWN cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle)
{
  (void)handle;
  return cudaEventCreateWithFlags(event, 0);
}
SHOWN cudaError_t cudaIpcCloseMemHandle(void *ptr)
{
  (void)ptr;
  opened--;
  return cudaSuccess;
}

/* ---- streams and events -------------------------------------------------- */

SHOWN cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
SHOWN cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
  (void)flags, (void)priority;
  *stream = sim_stream_create(s(), current);
  return cudaSuccess;
}
SHOWN cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
SHOWN cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                           enum cudaStreamCaptureStatus *status,
                                           unsigned long long *id, cudaGraph_t *graph,
                                           const cudaGraphNode_t **dependencies,
                                           const cudaGraphEdgeData **edges, size_t *count)
{
  (void)stream, (void)id, (void)graph, (void)dependencies, (void)edges, (void)count;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#endif
SHOWN cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
  sim_stream_synchronize(s(), current, stream);
  return faulted[current] ? fail(cudaErrorIllegalAddress) : cudaSuccess;
}
SHOWN cudaError_t cudaStreamQuery(cudaStream_t stream)
{
  return sim_pending(s(), current, stream) ? cudaErrorNotReady : cudaSuccess;
}
/* The core is given the program's events, so a handle is the simulated device's own. An event may
 * be asked for while another device is current. */
struct made {
  cudaEvent_t event;
  int device;
  struct made *next;
};
static struct made *made;
static pthread_mutex_t made_lock = PTHREAD_MUTEX_INITIALIZER;

static int device_of_event(cudaEvent_t event)
{
  pthread_mutex_lock(&made_lock);
  const struct made *one = made;
  while (one->event != event)
    one = one->next;
  int device = one->device;
  pthread_mutex_unlock(&made_lock);
  return device;
}

SHOWN cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
  (void)flags;
  struct made *one = malloc(sizeof *one);
  *event = sim_event_create(s(), current);
  pthread_mutex_lock(&made_lock);
  *one = (struct made){*event, current, made};
  made = one;
  pthread_mutex_unlock(&made_lock);
  return cudaSuccess;
}
SHOWN cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
  (void)flags;
  int device = device_of_event(event);
  sim_event_record(s(), device, event, stream);
  complete_if_alone(device, stream);
  return cudaSuccess;
}
SHOWN cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
  return cudaEventRecordWithFlags(event, stream, 0);
}
SHOWN cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
  (void)flags;
  sim_stream_wait(s(), current, stream, event);
  return cudaSuccess;
}
SHOWN cudaError_t cudaEventQuery(cudaEvent_t event)
{
  return sim_event_query(s(), device_of_event(event), event) == ESPER_OK ? cudaSuccess
                                                                         : cudaErrorNotReady;
}
SHOWN cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
  sim_event_synchronize(s(), device_of_event(event), event);
  return cudaSuccess;
}
SHOWN cudaError_t cudaEventDestroy(cudaEvent_t event)
{
  int device = device_of_event(event);
  pthread_mutex_lock(&made_lock);
  struct made **place = &made;
  while ((*place)->event != event)
    place = &(*place)->next;
  struct made *gone = *place;
  *place = gone->next;
  pthread_mutex_unlock(&made_lock);
  free(gone);
  sim_event_destroy(s(), device, event);
  return cudaSuccess;
}

/* ---- cuBLAS, as far as PyTorch gives it a workspace ------------------------ */

static void *workspace;

SHOWN int cublasCreate_v2(void **handle)
{
  *handle = &workspace;
  return 0;
}

SHOWN int cublasSetWorkspace_v2(void *handle, void *memory, size_t size)
{
  (void)handle, (void)size;
  workspace = memory;
  return 0;
}

/* The last that PyTorch set. */
SHOWN void *sim_workspace(void)
{
  return workspace;
}

#define ACCEPTED(name) \
  SHOWN int name(void) \
  {                    \
    return 0;          \
  }
ACCEPTED(cublasSetStream_v2)
ACCEPTED(cublasSetMathMode)
ACCEPTED(cublasDestroy_v2)

/* ---- the driver, as far as PyTorch links with it -------------------------- */

/* The library calls itself libcuda.so.1. */
SHOWN int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}

#define REFUSED(name)  \
  SHOWN int name(void) \
  {                    \
    return 801;        \
  } /* CUDA_ERROR_NOT_SUPPORTED */
REFUSED(cuCtxGetCurrent)
REFUSED(cuCtxSetCurrent)
REFUSED(cuDeviceGet)
REFUSED(cuDeviceGetAttribute)
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuGetErrorString)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuTensorMapEncodeTiled)

static int refuse(void)
{
  return 801;
}

/* What PyTorch looks up by name, and calls only for what is not simulated here. */
SHOWN cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                                   unsigned version, unsigned long long flags,
                                                   enum cudaDriverEntryPointQueryResult *result)
{
  (void)symbol, (void)version, (void)flags;
  int (*refused)(void) = refuse;
  memcpy(function, &refused, sizeof refused);
  if (result)
    *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* ---- an allocator of a MemPool's own ---------------------------------------- */

static struct own_pieces {
  int live, calls;
  int strict; /* calls that a capture would not have survived */
  size_t bytes;
} own;
static size_t own_most = SIZE_MAX;

SHOWN struct own_pieces own_pieces(void)
{
  return own;
}
SHOWN void own_limit(size_t bytes)
{
  own_most = bytes;
}
SHOWN void *own_malloc(size_t size, int device, void *stream)
{
  (void)device, (void)stream;
  own.calls++;
  own.strict += capture_mode != cudaStreamCaptureModeRelaxed;
  if (own.bytes + size > own_most)
    return NULL;
  own.live++;
  own.bytes += size;
  return aligned_alloc(512, (size + 511) / 512 * 512);
}
SHOWN void own_free(void *p, size_t size, int device, void *stream)
{
  (void)device, (void)stream;
  own.strict += capture_mode != cudaStreamCaptureModeRelaxed;
  own.live--;
  own.bytes -= size;
  free(p);
}
