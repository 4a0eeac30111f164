/* capi.h: the C interface that esper_alloc._core offers to other extension modules, above all to
 * the PyTorch shim, as the capsule named below. It gives them the one core of the process, however
 * the dynamic linker resolved their symbols. Valid C11 and C++ (GNU: for __typeof__).
 *
 *   const struct esper_capi *esper = esper_capi_import();
 *   if (!esper)
 *     return NULL; // a Python exception is set
 *   esper->malloc(esper->instance(), size, stream, &ptr);
 *
 * A member has the name of its function in esper_alloc.h or esper_sleep.h, without "esper_". */
#ifndef ESPER_CAPI_H
#define ESPER_CAPI_H

#include "../esper_sleep.h"

#define ESPER_CAPI_NAME "esper_alloc._core.capi"

/* Increased with every change of the list below or of a type in these headers. */
#define ESPER_CAPI_VERSION 17u

/* F(name) for each public function esper_<name> */
#define ESPER_CAPI_FUNCTIONS(F)      \
  F(status_name)                     \
  F(last_error)                      \
  F(alloc_malloc)                    \
  F(alloc_free)                      \
  F(alloc_record_use)                \
  F(alloc_record_stream)             \
  F(alloc_touch)                     \
  F(alloc_init)                      \
  F(alloc_reset)                     \
  F(alloc_set_memory_fraction)       \
  F(alloc_base)                      \
  F(alloc_set_record_stream_visible) \
  F(alloc_black_box)                 \
  F(alloc_note_oom)                  \
  F(alloc_find_nodes)                \
  F(core_create)                     \
  F(core_destroy)                    \
  F(core_is_valid)                   \
  F(device_count)                    \
  F(malloc)                          \
  F(malloc_from)                     \
  F(free)                            \
  F(record_use)                      \
  F(record_use_event)                \
  F(record_stream)                   \
  F(note_use)                        \
  F(note_unseen_uses)                \
  F(free_after_all)                  \
  F(retire)                          \
  F(empty_cache)                     \
  F(fence)                           \
  F(fence_rounds)                    \
  F(pool_create)                     \
  F(pool_begin)                      \
  F(pool_end)                        \
  F(pool_release)                    \
  F(pool_use_count)                  \
  F(pool_empty)                      \
  F(pool_live_are)                   \
  F(pool_set_flags)                  \
  F(pool_set_source)                 \
  F(checkpoint_take)                 \
  F(checkpoint_free)                 \
  F(checkpoint_restore)              \
  F(set_memory_fraction)             \
  F(get_memory_fraction)             \
  F(configure)                       \
  F(get_config)                      \
  F(capture_begin)                   \
  F(capture_end)                     \
  F(get_pool_stats)                  \
  F(get_stats)                       \
  F(reset_peak_stats)                \
  F(reset_accumulated_stats)         \
  F(get_counters)                    \
  F(driver_call_name)                \
  F(driver_calls)                    \
  F(get_failure)                     \
  F(memory_info)                     \
  F(largest_available)               \
  F(find_block)                      \
  F(find_base)                       \
  F(snapshot_take)                   \
  F(snapshot_free)                   \
  F(trace_watch)                     \
  F(pin)                             \
  F(unpin)                           \
  F(add_peer)                        \
  F(share)                           \
  F(unshare)                         \
  F(open_shared)                     \
  F(close_shared)                    \
  F(tag_push)                        \
  F(tag_pop)                         \
  F(tag_current)                     \
  F(get_tag_stats)                   \
  F(stays_advice)                    \
  F(sleep)                           \
  F(wake)                            \
  F(sleep_trim)                      \
  F(pool_asleep)

#define ESPER_CAPI_TYPE(name) typedef __typeof__(esper_##name) *esper_capi_##name;
ESPER_CAPI_FUNCTIONS(ESPER_CAPI_TYPE)
#undef ESPER_CAPI_TYPE

struct esper_capi {
  unsigned version; /* ESPER_CAPI_VERSION of the _core that made this */
  size_t size;      /* sizeof(struct esper_capi) there */

  /* The core of this process over the CUDA driver, made by the first call. NULL: it could not be
   * made, and esper_last_error() says why; the next call tries again. */
  esper_core *(*instance)(void);

#define ESPER_CAPI_MEMBER(name) esper_capi_##name name;
  ESPER_CAPI_FUNCTIONS(ESPER_CAPI_MEMBER)
#undef ESPER_CAPI_MEMBER
};

#ifdef Py_PYTHON_H
/* The interface of the installed _core. NULL with a Python exception: it could not be imported, or
 * this header belongs to another one. */
static inline const struct esper_capi *esper_capi_import(void)
{
  /* PyCapsule_Import imports only the package, not the submodule. */
  PyObject *core = PyImport_ImportModule("esper_alloc._core");
  if (!core)
    return NULL;
  Py_DECREF(core);
  const struct esper_capi *capi = (const struct esper_capi *)PyCapsule_Import(ESPER_CAPI_NAME, 0);
  if (!capi)
    return NULL;
  if (capi->version != ESPER_CAPI_VERSION || capi->size != sizeof(struct esper_capi)) {
    PyErr_Format(PyExc_ImportError,
                 "esper_alloc._core offers version %u of its C interface, this module was "
                 "built for version %u: rebuild and reinstall esper_alloc",
                 capi->version, ESPER_CAPI_VERSION);
    return NULL;
  }
  return capi;
}
#endif

#endif
