/* fake_runtime.c: the few functions of the CUDA runtime that PyTorch's own code asks
 * on the way to an allocator, for a process without a GPU. Preloaded, beside the fake
 * driver of tests/device. A MemPool's own allocator stands here too. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static _Thread_local int current;

int cudaGetDeviceCount(int *count)
{
  *count = 2;
  return 0;
}

int cudaGetDevice(int *device)
{
  *device = current;
  return 0;
}

int cudaSetDevice(int device)
{
  current = device;
  return 0;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
  *least = *greatest = 0;
  return 0;
}

int cudaStreamIsCapturing(void *stream, int *status)
{
  (void)stream;
  *status = 0;
  return 0;
}

enum { GLOBAL, THREAD_LOCAL, RELAXED };
static _Thread_local int capture_mode = GLOBAL;

int cudaThreadExchangeStreamCaptureMode(int *mode)
{
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}

/* Of the driver, which PyTorch opens as libcuda.so.1. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}

/* ---- an allocator of a MemPool's own ---------------------------------------- */

typedef struct pieces {
  int live, calls, last_device;
  int strict; /* calls that a capture would not have survived */
  size_t bytes;
} pieces;
static pieces all;

pieces own_pieces(void)
{
  return all;
}

static size_t limit = SIZE_MAX;

void own_limit(size_t bytes)
{
  limit = bytes;
}

void *own_malloc(size_t size, int device, void *stream)
{
  (void)stream;
  all.calls++;
  all.strict += capture_mode != RELAXED;
  if (all.bytes + size > limit)
    return NULL;
  void *p = aligned_alloc(512, (size + 511) / 512 * 512);
  all.live++;
  all.bytes += size;
  all.last_device = device;
  return p;
}

void own_free(void *p, size_t size, int device, void *stream)
{
  (void)stream;
  all.strict += capture_mode != RELAXED;
  all.live--;
  all.bytes -= size;
  all.last_device = device;
  free(p);
}
