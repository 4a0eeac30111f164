/* esper_alloc.c: the allocator of this process. It has one core over the CUDA driver, made at first
 * use. Extensions and torch.cuda.memory.CUDAPluggableAllocator call these functions, which only
 * find the core and the device that a call means. */
#include "esper_alloc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "black_box/dump.h"
#include "black_box/recorder.h"
#include "core/base/error.h"
#include "core/requests/record_use.h"
#include "device/cuda/cuda.h"
#include "instance.h"

static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(esper_core *) the_core;
static atomic_bool record_stream_visible;
static void (*while_waiting)(void (*wait)(void *argument), void *argument);

/* ---- the driver -------------------------------------------------------- */

/* Makes the driver's failure the thread's last error. */
static esper_status from_cuda(esper_status status)
{
  return status == ESPER_OK ? ESPER_OK : error_set(status, "%s", esper_cuda_last_error());
}

esper_status esper_cuda_driver(const esper_driver **driver)
{
  return from_cuda(esper_cuda_open(driver));
}

/* ---- the core ---------------------------------------------------------- */

/* With this option of PyTorch's, NCCL registers all segments. It can do so with classic ones
 * only. */
static bool nccl_registers_segments(void)
{
  const char *given = getenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK");
  return given && *given && strchr("1yYtT", *given);
}

static esper_status segments_from_environment(esper_config *config)
{
  const char *kind = getenv("ESPER_ALLOC_SEGMENTS");
  if (!kind || !*kind || strcmp(kind, "auto") == 0)
    config->segments = nccl_registers_segments() ? ESPER_SEGMENTS_CLASSIC : ESPER_SEGMENTS_AUTO;
  else if (strcmp(kind, "classic") == 0)
    config->segments = ESPER_SEGMENTS_CLASSIC;
  else if (strcmp(kind, "mapped") == 0)
    config->segments = ESPER_SEGMENTS_MAPPED;
  else
    return error_set(ESPER_INVALID,
                     "ESPER_ALLOC_SEGMENTS=%s is not a kind of segments: use auto, mapped or "
                     "classic",
                     kind);
  return ESPER_OK;
}

/* Reads a size: up to 19 digits, and perhaps a unit, K, M, G or T or the same with iB, after at
 * most one space. A product that exceeds a size_t becomes SIZE_MAX.
 * esper_alloc/torch_allocator/sizes.py reads the same sizes. */
static bool parse_size(const char *text, size_t *size)
{
  static const char units[] = "KMGT";
  size_t digits = strspn(text, "0123456789");
  if (digits == 0 || digits > 19)
    return false;
  *size = (size_t)strtoull(text, NULL, 10);
  const char *rest = text + digits;
  if (!*rest)
    return true;
  rest += *rest == ' ';
  const char *unit = *rest ? strchr(units, *rest) : NULL;
  if (!unit || (rest[1] && strcmp(rest + 1, "iB") != 0))
    return false;
  unsigned shift = 10u * (unsigned)(unit - units + 1);
  *size = *size > SIZE_MAX >> shift ? SIZE_MAX : *size << shift;
  return true;
}

/* To the core, 0 means the default, but a user who says 0 means the least. */
static esper_status allowance_from_environment(esper_config *config)
{
  const char *given = getenv("ESPER_ALLOC_ALLOWANCE");
  if (!given || !*given)
    given = "128MiB";
  if (strcmp(given, "off") == 0)
    config->allowance = ESPER_ALLOWANCE_OFF;
  else if (!parse_size(given, &config->allowance))
    return error_set(ESPER_INVALID,
                     "ESPER_ALLOC_ALLOWANCE=%s is not a size: use bytes, a size such as 128MiB, "
                     "1 GiB or 512M, or off",
                     given);
  else if (config->allowance == 0)
    config->allowance = 1;
  return ESPER_OK;
}

static esper_status config_from_environment(esper_config *config)
{
  *config = (esper_config){.while_waiting = while_waiting};
  esper_status status = allowance_from_environment(config);
  return status == ESPER_OK ? segments_from_environment(config) : status;
}

void esper_instance_waits(void (*how)(void (*wait)(void *argument), void *argument))
{
  while_waiting = how;
}

esper_status esper_alloc_black_box(esper_core *core)
{
  const char *given = getenv("ESPER_ALLOC_BLACK_BOX");
  size_t bytes;
  if (!given || !*given)
    given = "64MiB";
  if (strcmp(given, "off") == 0)
    return ESPER_OK;
  if (!parse_size(given, &bytes))
    return error_set(ESPER_INVALID,
                     "ESPER_ALLOC_BLACK_BOX=%s is not a size: use bytes, a size such as 64MiB, "
                     "1 GiB or 512M, or off",
                     given);
  box_begin(core, bytes);
  return ESPER_OK;
}

static esper_core *instance_make(void)
{
  const esper_driver *driver;
  esper_config config;
  esper_core *core = NULL;
  if (config_from_environment(&config) != ESPER_OK || esper_cuda_driver(&driver) != ESPER_OK ||
      esper_core_create(driver, &config, &core) != ESPER_OK)
    return NULL;
  if (esper_alloc_black_box(core) != ESPER_OK) {
    esper_core_destroy(core);
    core = NULL;
  }
  return core;
}

/* The core, if it exists. In a forked child it does not: its memory belongs to the parent, and a
 * lock that another thread held at the fork stays locked for ever. */
static esper_core *instance_if_made(void)
{
  esper_core *core = atomic_load_explicit(&the_core, memory_order_acquire);
  return core && !esper_cuda_is_forked() ? core : NULL;
}

esper_core *esper_instance(void)
{
  esper_core *core = instance_if_made();
  if (core)
    return core;
  if (esper_cuda_is_forked()) {
    const esper_driver *driver;
    esper_cuda_driver(&driver); /* sets the last error */
    return NULL;
  }
  pthread_mutex_lock(&making);
  core = atomic_load_explicit(&the_core, memory_order_relaxed);
  if (!core) {
    core = instance_make();
    atomic_store_explicit(&the_core, core, memory_order_release);
  }
  pthread_mutex_unlock(&making);
  return core;
}

/* ---- what a call means ------------------------------------------------- */

/* The legacy default stream lives as long as the process. About other streams nothing is known
 * here. */
static esper_stream stream_of(void *handle, int device)
{
  return (esper_stream){.handle = handle,
                        .device = device,
                        .flags = (uintptr_t)handle <= 1 ? ESPER_STREAM_IMMORTAL : 0};
}

/* A bare CUDAPluggableAllocator works, but it keeps memory longer than necessary. One warning says
 * so. */
static void warn_of_bare_allocator(void)
{
  static atomic_bool said;
  if (atomic_load_explicit(&said, memory_order_relaxed) || atomic_exchange(&said, true))
    return;
  fputs("esper_alloc: PyTorch does not pass calls of record_stream to this allocator, so freed "
        "memory is reused only after all earlier work of its device; use "
        "esper_alloc.pluggable_allocator() in place of a bare CUDAPluggableAllocator\n",
        stderr);
}

/* ---- the public functions ---------------------------------------------- */

void *esper_alloc_malloc(size_t size, int device, void *stream)
{
  void *pointer = NULL;
  esper_core *core = esper_instance();
  if (core && !atomic_load_explicit(&record_stream_visible, memory_order_relaxed))
    warn_of_bare_allocator();
  if (!core || esper_malloc(core, size, stream_of(stream, device), &pointer) != ESPER_OK)
    return NULL;
  return pointer;
}

void esper_alloc_free(void *ptr, size_t size, int device, void *stream)
{
  (void)size, (void)device, (void)stream;
  esper_core *core = instance_if_made();
  if (!core || !ptr)
    return;
  if (!atomic_load_explicit(&record_stream_visible, memory_order_relaxed) &&
      esper_free_after_all(core, ptr) != ESPER_OK)
    return; /* not a live block of this core; or no host memory: it is never reused */
  esper_free(core, ptr);
}

esper_status esper_alloc_record_use(const void *ptr, void *stream)
{
  int device;
  esper_core *core = esper_instance();
  if (!core)
    return ESPER_UNSUPPORTED;
  esper_status status;
  if ((uintptr_t)stream > 2 && mark_by_handle(core, ptr, stream, &status))
    return status;
  status = from_cuda(esper_cuda_stream_device(stream, &device));
  if (status != ESPER_OK)
    return status;
  return esper_record_use(core, &ptr, 1, stream_of(stream, device), 0, NULL);
}

void esper_alloc_record_stream(void *ptr, void *stream)
{
  int device;
  esper_core *core = instance_if_made();
  if (!core)
    return;
  if (from_cuda(esper_cuda_stream_device(stream, &device)) != ESPER_OK ||
      esper_record_stream(core, ptr, stream_of(stream, device)) != ESPER_OK)
    esper_free_after_all(core, ptr); /* an error cannot be reported here: be safe */
}

esper_status esper_alloc_touch(const void *ptr, void *stream)
{
  int device;
  esper_core *core = esper_instance();
  if (!core)
    return ESPER_UNSUPPORTED;
  esper_status status = from_cuda(esper_cuda_stream_device(stream, &device));
  return status == ESPER_OK ? esper_note_use(core, &ptr, 1, stream_of(stream, device)) : status;
}

void esper_alloc_init(int device_count)
{
  (void)device_count;
  esper_instance();
}

void esper_alloc_reset(void)
{
  esper_core *core = instance_if_made();
  int count = core ? esper_device_count(core) : 0;
  for (int device = 0; device < count; device++)
    esper_empty_cache(core, device, NULL);
}

void esper_alloc_set_memory_fraction(double fraction, int device)
{
  esper_core *core = esper_instance();
  if (core)
    esper_set_memory_fraction(core, device, fraction);
}

void *esper_alloc_base(void *ptr, size_t *size)
{
  void *address;
  size_t bytes;
  esper_core *core = instance_if_made();
  bool found = core && esper_find_base(core, ptr, &address, &bytes) == ESPER_OK;
  if (size)
    *size = found ? bytes : 0;
  return found ? address : NULL;
}

void esper_alloc_set_record_stream_visible(int visible)
{
  atomic_store(&record_stream_visible, visible != 0);
}

const char *esper_alloc_note_oom(void)
{
  esper_failure f;
  char about[400];
  esper_get_failure(&f);
  snprintf(about, sizeof about,
           "{\"oom\": {\"site\": %u, \"device\": %d, \"requested\": %zu, \"device_free\": %zu, "
           "\"device_total\": %zu, \"limit\": %zu}}",
           box_site_here(), f.device, f.requested, f.device_free, f.device_total, f.limit);
  return dump_oom(about);
}

void esper_alloc_find_nodes(int (*node)(uint64_t *hash, char *name, size_t size))
{
  box_find_nodes(node);
}
