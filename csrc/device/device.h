/* device.h: what the core asks of a driver, as one struct of functions. The drivers are cuda/ (the
 * CUDA driver, loaded at run time), sim/ (a simulated device that runs anywhere and checks the
 * core), and ../replay/ (another driver with streams that can be stalled). The core calls nothing
 * else that leaves the process.
 *
 * Contract of every function
 *   - `self` is the struct's `self`. Any thread may call at any time.
 *   - ESPER_OK means done. Any other status means that nothing happened, and that
 *     last_error() describes the failure to the calling thread.
 *   - ESPER_SHUT_DOWN: the driver is being unloaded, and the core stops calling it.
 *     ESPER_DEVICE_ERROR: any other unexpected failure, sticky errors of the device included.
 *   - The call leaves the thread's current context and capture mode as they were. Functions
 *     that allocate, free, query or create work while other streams are being captured, in
 *     every capture mode.
 *   - Stream handles are opaque. 0 and 1 mean the device's legacy default stream, 2 the
 *     calling thread's own default stream. */
#ifndef ESPER_DEVICE_H
#define ESPER_DEVICE_H

#include <stdint.h>

#include "../esper_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ESPER_CAPTURE_INVALID (UINT64_MAX - 1)

typedef struct esper_driver {
  const char *name; /* for example "cuda" */
  void *self;

  /* Devices. */
  esper_status (*device_count)(void *self, int *count);
  esper_status (*memory_info)(void *self, int device, size_t *free, size_t *total);
  /* Only the total, which costs nothing. */
  esper_status (*memory_total)(void *self, int device, size_t *total);
  /* Waits until all work that is enqueued on the device is done. ESPER_CAPTURING: one of its
   * streams is being captured, and that capture is now invalid. */
  esper_status (*device_synchronize)(void *self, int device);

  /* Classic segments. memory_alloc aligns to at least 512 bytes; ESPER_OUT_OF_MEMORY leaves no
   * error behind in the driver. memory_free may wait until the device is idle. */
  esper_status (*memory_alloc)(void *self, int device, size_t size, uintptr_t *address);
  esper_status (*memory_free)(void *self, int device, uintptr_t address);

  /* Mapped segments: pages (physical handles) are mapped into reserved ranges of addresses.
   * ESPER_UNSUPPORTED: the device has no virtual memory management; page_granularity then stores 0.
   * Sizes and offsets are multiples of the granularity. A page may be mapped at several addresses.
   * page_map makes the range readable and writable for its device and for `count` peers.
   * page_access gives one more peer access to a range of mapped whole pages. page_unmap unmaps such
   * a range, and does not wait for running work: the caller knows that none touches it. peer_check:
   * ESPER_UNSUPPORTED if `peer` cannot access memory of `device` at all.
   *
   * page_export gives a page a name; the caller fills in its size. With the name, page_import gets
   * a page of its own, in this or another process. The memory lives until both pages were released
   * and unmapped everywhere. page_unexport, which cannot fail, ends the offer; pages that were
   * imported stay. page_export: ESPER_UNSUPPORTED: pages of the device cannot be shared.
   * page_import: ESPER_INVALID: nobody offers a page by that name. */
  esper_status (*page_granularity)(void *self, int device, size_t *bytes);
  esper_status (*range_reserve)(void *self, int device, size_t size, uintptr_t *address);
  esper_status (*range_free)(void *self, int device, uintptr_t address, size_t size);
  esper_status (*page_create)(void *self, int device, size_t size, uint64_t *page);
  esper_status (*page_release)(void *self, int device, uint64_t page);
  esper_status (*page_map)(void *self, int device, uintptr_t address, size_t size, uint64_t page,
                           const int *peers, int count);
  esper_status (*page_unmap)(void *self, int device, uintptr_t address, size_t size);
  esper_status (*page_access)(void *self, int device, uintptr_t address, size_t size, int peer);
  esper_status (*peer_check)(void *self, int device, int peer);
  esper_status (*page_export)(void *self, int device, uint64_t page, esper_page_name *name);
  esper_status (*page_unexport)(void *self, int device, const esper_page_name *name);
  esper_status (*page_import)(void *self, int device, const esper_page_name *name, uint64_t *page);

  /* Host memory that the device can copy to and from without a detour. host_alloc:
   * ESPER_OUT_OF_MEMORY: the host has not so much. host_free may wait until the device is idle. The
   * copies are enqueued on a stream of the device that is not capturing; memory_zero enqueues a
   * fill with zeros. The host memory stays as it is until the copy is done. */
  esper_status (*host_alloc)(void *self, int device, size_t size, void **memory);
  esper_status (*host_free)(void *self, int device, void *memory);
  esper_status (*copy_to_host)(void *self, int device, void *stream, void *to, uintptr_t from,
                               size_t size);
  esper_status (*copy_to_device)(void *self, int device, void *stream, uintptr_t to,
                                 const void *from, size_t size);
  esper_status (*memory_zero)(void *self, int device, void *stream, uintptr_t address, size_t size);

  /* Streams. stream_id stores an id that is unique in the process and, unlike the handle, never
   * used again. stream_capture stores the id of the stream's capture, or 0 if it is not being
   * captured. An id is never 0 or UINT64_MAX and never used again. Between invalidation and end of
   * a capture it stores ESPER_CAPTURE_INVALID: what is enqueued then never runs. stream_create
   * makes a stream for the core that does not synchronise with the legacy stream. stream_wait makes
   * the stream's future work wait for the event's last record. `device` is the stream's; the event
   * may be of another device. */
  esper_status (*stream_id)(void *self, int device, void *stream, uint64_t *id);
  esper_status (*stream_capture)(void *self, int device, void *stream, uint64_t *capture);
  esper_status (*stream_create)(void *self, int device, void **stream);
  esper_status (*stream_destroy)(void *self, int device, void *stream);
  esper_status (*stream_wait)(void *self, int device, void *stream, void *event);

  /* Events, without timing. event_record makes the event stand for all work that is on the stream
   * now. Event and stream belong to `device`, and the stream must not be capturing. event_query:
   * ESPER_OK: completed, or never recorded. ESPER_NOT_READY: not yet. ESPER_CAPTURING: it was
   * recorded inside a capture. event_destroy may come before the event has completed. */
  esper_status (*event_create)(void *self, int device, void **event);
  esper_status (*event_destroy)(void *self, int device, void *event);
  esper_status (*event_record)(void *self, int device, void *event, void *stream);
  esper_status (*event_query)(void *self, int device, void *event);
  /* event_record_all makes the event stand for all work that is on any stream of the device now.
   * ESPER_UNSUPPORTED: the driver cannot do that. ESPER_CAPTURING: as from device_synchronize, also
   * with the capture invalid. */
  esper_status (*event_record_all)(void *self, int device, void *event);
  esper_status (*event_synchronize)(void *self, int device, void *event);
  /* As event_synchronize, but waits about so many microseconds at most. ESPER_NOT_READY: the event
   * has not completed by then. */
  esper_status (*event_wait)(void *self, int device, void *event, unsigned microseconds);

  /* Inside a capture, a graph is being made. These two ask about it and change nothing. Handles of
   * nodes mean nothing once the capture is over, so `capture` is compared first. ESPER_INVALID: the
   * stream is not in that capture, or the capture is not active any more. capture_tails: stores the
   * nodes that the stream's next operation will directly depend on, and their number in *count;
   * capture_before: those that `node` directly depends on. ESPER_UNSUPPORTED: there are *count or
   * more, or the driver cannot tell. */
  esper_status (*capture_tails)(void *self, int device, void *stream, uint64_t capture,
                                void **tails, size_t *count);
  esper_status (*capture_before)(void *self, int device, void *stream, uint64_t capture, void *node,
                                 void **before, size_t *count);

  /* The calling thread's last failure, in words: the driver's function, the error's name and its
   * meaning. Never NULL. */
  const char *(*last_error)(void *self);
} esper_driver;

/* The CUDA driver, one for the process; it lives until exit. ESPER_UNSUPPORTED: libcuda cannot be
 * loaded, is too old, or finds no device; esper_last_error() says which. */
ESPER_API esper_status esper_cuda_driver(const esper_driver **driver);

#ifdef __cplusplus
}
#endif
#endif
