/* device.h: what the core asks of a driver, as one struct of functions.
 *
 * Two drivers implement it: cuda/ (the CUDA driver, loaded at run time) and
 * sim/ (a simulated device that runs anywhere and checks the core). The core
 * calls nothing else that leaves the process.
 *
 * Contract of every function
 *   - `self` is the struct's `self`. Any thread may call at any time.
 *   - ESPER_OK means done. Any other status means that nothing happened, and
 *     that last_error() describes the failure for the calling thread.
 *   - ESPER_SHUT_DOWN: the driver is being unloaded; the core then stops
 *     calling it. ESPER_DEVICE_ERROR: anything else unexpected, sticky errors
 *     of the device included.
 *   - The thread's current context and capture mode are the same after the
 *     call as before it. Calls that allocate, free, query or create must work
 *     while some other stream is being captured, in whatever capture mode.
 *   - Stream handles are opaque; 0 and 1 mean the device's legacy default
 *     stream, 2 the calling thread's own default stream. */
#ifndef ESPER_DEVICE_H
#define ESPER_DEVICE_H

#include <stdint.h>

#include "../esper_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ESPER_CAPTURE_INVALID (UINT64_MAX - 1)

typedef struct esper_driver {
  const char *name; /* "cuda" or "sim" */
  void *self;

  /* Devices. */
  esper_status (*device_count)(void *self, int *count);
  esper_status (*memory_info)(void *self, int device, size_t *free, size_t *total);
  /* The latter alone, which costs nothing. */
  esper_status (*memory_total)(void *self, int device, size_t *total);
  /* Waits until all work enqueued on the device before the call is done.
   * ESPER_CAPTURING while a stream of it is being captured, and the capture
   * is invalid then. */
  esper_status (*device_synchronize)(void *self, int device);

  /* Classic segments. memory_alloc aligns to 512 bytes at least;
   * ESPER_OUT_OF_MEMORY leaves no error behind in the driver. memory_free may
   * wait for the device to be idle. */
  esper_status (*memory_alloc)(void *self, int device, size_t size, uintptr_t *address);
  esper_status (*memory_free)(void *self, int device, uintptr_t address);

  /* Mapped segments: pages (physical handles) mapped into reserved ranges.
   * ESPER_UNSUPPORTED where the device has no virtual memory management;
   * page_granularity then says 0. Sizes and offsets are multiples of the
   * granularity. A page may be mapped at several addresses. page_map makes
   * the range readable and writable by its device and by `count` peers.
   * page_access makes a range, all of it mapped, in whole pages, readable and
   * writable by one more peer, or, `allowed` 0, by it no longer. page_unmap
   * does not wait for running work: the caller knows that none touches the
   * range. peer_check: ESPER_UNSUPPORTED if `peer`, another device, cannot
   * access the memory of `device` at all.
   *
   * page_export gives a page a name (its size is the caller's to write) by
   * which page_import, here or in another process, gets a page of its own: the
   * memory lives until both were released and unmapped everywhere. Until
   * page_unexport, which cannot fail, it can be imported; who has it, keeps it.
   * page_export: ESPER_UNSUPPORTED: pages of the device cannot be shared.
   * page_import: ESPER_INVALID: nobody offers a page of that name. */
  esper_status (*page_granularity)(void *self, int device, size_t *bytes);
  esper_status (*range_reserve)(void *self, int device, size_t size, uintptr_t *address);
  esper_status (*range_free)(void *self, int device, uintptr_t address, size_t size);
  esper_status (*page_create)(void *self, int device, size_t size, uint64_t *page);
  esper_status (*page_release)(void *self, int device, uint64_t page);
  esper_status (*page_map)(void *self, int device, uintptr_t address, size_t size, uint64_t page,
                           const int *peers, int count);
  esper_status (*page_unmap)(void *self, int device, uintptr_t address, size_t size);
  esper_status (*page_access)(void *self, int device, uintptr_t address, size_t size, int peer,
                              int allowed);
  esper_status (*peer_check)(void *self, int device, int peer);
  esper_status (*page_export)(void *self, int device, uint64_t page, esper_page_name *name);
  esper_status (*page_unexport)(void *self, int device, const esper_page_name *name);
  esper_status (*page_import)(void *self, int device, const esper_page_name *name, uint64_t *page);

  /* Streams. stream_id is unique in the process and never used again, unlike
   * the handle. stream_capture stores 0 when the stream is not being captured,
   * else the id of the capture, never 0 nor UINT64_MAX, nor used again; while
   * a capture has been invalidated and not ended, ESPER_CAPTURE_INVALID: what
   * is enqueued then never runs. stream_create makes a stream of our own that
   * does not synchronise with the legacy stream. stream_wait makes the
   * stream's future work wait for the event's last record; it may cross
   * devices: `device` is the stream's. */
  esper_status (*stream_id)(void *self, int device, void *stream, uint64_t *id);
  esper_status (*stream_capture)(void *self, int device, void *stream, uint64_t *capture);
  esper_status (*stream_create)(void *self, int device, void **stream);
  esper_status (*stream_destroy)(void *self, int device, void *stream);
  esper_status (*stream_wait)(void *self, int device, void *stream, void *event);

  /* Events, without timing. event_record: the event stands for all work that
   * is on the stream now; event and stream belong to `device`; on a capturing
   * stream it must not be called. event_query: ESPER_OK when completed,
   * ESPER_NOT_READY, ESPER_CAPTURING when it was recorded inside a capture; a
   * fresh event answers ESPER_OK. event_destroy may come before completion. */
  esper_status (*event_create)(void *self, int device, void **event);
  esper_status (*event_destroy)(void *self, int device, void *event);
  esper_status (*event_record)(void *self, int device, void *event, void *stream);
  esper_status (*event_query)(void *self, int device, void *event);
  /* event_record_all: the event stands for all work that is on any stream of
   * the device now. ESPER_UNSUPPORTED where the driver cannot say that,
   * ESPER_CAPTURING as from device_synchronize, and as costly. */
  esper_status (*event_record_all)(void *self, int device, void *event);
  esper_status (*event_synchronize)(void *self, int device, void *event);

  /* Inside a capture, which is a graph in the making: every stream that takes
   * part has nodes that its next operation will depend on. Nodes are handles
   * that mean something while their capture is active, and nothing after it:
   * `capture` is compared before a node is touched. ESPER_INVALID: the stream
   * is not in that capture, or that is not active any more.
   * ESPER_UNSUPPORTED: the driver cannot say.
   * capture_point: *node is the one node that everything the stream is ordered
   * after comes before, or is; NULL: there is nothing yet. Where there is no
   * such node, an empty one is added.
   * capture_depend: the stream's next operation depends on `node`, too; fully:
   * it starts when that has ended.
   * capture_before: what `node` of the capture, in which the stream still is,
   * depends on directly, stored, and their number in *count. ESPER_UNSUPPORTED:
   * they are *count or more. */
  esper_status (*capture_point)(void *self, int device, void *stream, uint64_t capture,
                                void **node);
  esper_status (*capture_depend)(void *self, int device, void *stream, uint64_t capture,
                                 void *node);
  esper_status (*capture_before)(void *self, int device, void *stream, uint64_t capture, void *node,
                                 void **before, size_t *count);

  /* The calling thread's last failure, in words: the driver's function, the
   * error's name and its meaning. Never NULL. */
  const char *(*last_error)(void *self);
} esper_driver;

/* The CUDA driver. ESPER_UNSUPPORTED, with the reason in esper_last_error(),
 * where libcuda cannot be loaded, is too old, or finds no device. One per
 * process; it lives until exit. */
ESPER_API esper_status esper_cuda_driver(const esper_driver **driver);

#ifdef __cplusplus
}
#endif
#endif
