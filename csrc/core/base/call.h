/* call.h: the core's calls to its driver: one wrapper for each function, which counts. A driver
 * that is being unloaded answers ESPER_SHUT_DOWN, and is not called again. */
#ifndef ESPER_CALL_H
#define ESPER_CALL_H

#include "core.h"

/* D(function, parameters, arguments) */
/* clang-format off */
#define ESPER_DRIVER_FUNCTIONS(D)                                                                  \
  D(memory_info, (core_t *c, int d, size_t *free, size_t *total), (d, free, total))                \
  D(memory_total, (core_t *c, int d, size_t *total), (d, total))                                   \
  D(device_synchronize, (core_t *c, int d), (d))                                                   \
  D(memory_alloc, (core_t *c, int d, size_t size, uintptr_t *address), (d, size, address))         \
  D(memory_free, (core_t *c, int d, uintptr_t address), (d, address))                              \
  D(page_granularity, (core_t *c, int d, size_t *bytes), (d, bytes))                               \
  D(range_reserve, (core_t *c, int d, size_t size, uintptr_t *address), (d, size, address))        \
  D(range_free, (core_t *c, int d, uintptr_t address, size_t size), (d, address, size))            \
  D(page_create, (core_t *c, int d, size_t size, uint64_t *page), (d, size, page))                 \
  D(page_release, (core_t *c, int d, uint64_t page), (d, page))                                    \
  D(page_map, (core_t *c, int d, uintptr_t address, size_t size, uint64_t page, const int *peers,  \
    int count), (d, address, size, page, peers, count))                                            \
  D(page_unmap, (core_t *c, int d, uintptr_t address, size_t size), (d, address, size))            \
  D(page_access, (core_t *c, int d, uintptr_t address, size_t size, int peer),                     \
    (d, address, size, peer))                                                                      \
  D(peer_check, (core_t *c, int d, int peer), (d, peer))                                           \
  D(page_export, (core_t *c, int d, uint64_t page, esper_page_name *name), (d, page, name))        \
  D(page_unexport, (core_t *c, int d, const esper_page_name *name), (d, name))                     \
  D(page_import, (core_t *c, int d, const esper_page_name *name, uint64_t *page), (d, name, page)) \
  D(host_alloc, (core_t *c, int d, size_t size, void **memory), (d, size, memory))                 \
  D(host_free, (core_t *c, int d, void *memory), (d, memory))                                      \
  D(copy_to_host, (core_t *c, int d, void *stream, void *to, uintptr_t from, size_t size),         \
    (d, stream, to, from, size))                                                                   \
  D(copy_to_device, (core_t *c, int d, void *stream, uintptr_t to, const void *from, size_t size), \
    (d, stream, to, from, size))                                                                   \
  D(memory_zero, (core_t *c, int d, void *stream, uintptr_t address, size_t size),                 \
    (d, stream, address, size))                                                                    \
  D(stream_id, (core_t *c, int d, void *stream, uint64_t *id), (d, stream, id))                    \
  D(stream_capture, (core_t *c, int d, void *stream, uint64_t *capture), (d, stream, capture))     \
  D(stream_create, (core_t *c, int d, void **stream), (d, stream))                                 \
  D(stream_destroy, (core_t *c, int d, void *stream), (d, stream))                                 \
  D(stream_wait, (core_t *c, int d, void *stream, void *event), (d, stream, event))                \
  D(capture_tails, (core_t *c, int d, void *stream, uint64_t capture, void **tails,                \
    size_t *count), (d, stream, capture, tails, count))                                            \
  D(capture_before, (core_t *c, int d, void *stream, uint64_t capture, void *node, void **before,  \
    size_t *count), (d, stream, capture, node, before, count))                                     \
  D(event_create, (core_t *c, int d, void **event), (d, event))                                    \
  D(event_destroy, (core_t *c, int d, void *event), (d, event))                                    \
  D(event_record, (core_t *c, int d, void *event, void *stream), (d, event, stream))               \
  D(event_record_all, (core_t *c, int d, void *event), (d, event))                                 \
  D(event_query, (core_t *c, int d, void *event), (d, event))                                      \
  D(event_synchronize, (core_t *c, int d, void *event), (d, event))                                \
  D(event_wait, (core_t *c, int d, void *event, unsigned microseconds), (d, event, microseconds))
/* clang-format on */

enum {
#define CALL_ENUM(name, parameters, arguments) CALL_##name,
  ESPER_DRIVER_FUNCTIONS(CALL_ENUM)
#undef CALL_ENUM
      CALL_COUNT
};

_Static_assert((int)CALL_COUNT <= (int)DRIVER_CALLS, "room for every counter");

/* Notes the status of a driver call that was made and counted elsewhere, and returns it. */
esper_status call_end(core_t *c, esper_status status);

#define CALL_STRIP(...) __VA_ARGS__
#define CALL_DECLARE(name, parameters, arguments) esper_status call_##name parameters;
ESPER_DRIVER_FUNCTIONS(CALL_DECLARE)
#undef CALL_DECLARE

#endif
