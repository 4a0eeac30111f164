/* functions.h: the CUDA driver's implementations of device.h, file by file. */
#ifndef ESPER_CUDA_FUNCTIONS_H
#define ESPER_CUDA_FUNCTIONS_H

#include "../device.h"

/* memory.c */
esper_status cuda_device_count(void *self, int *count);
esper_status cuda_memory_info(void *self, int device, size_t *free, size_t *total);
esper_status cuda_memory_total(void *self, int device, size_t *total);
esper_status cuda_device_synchronize(void *self, int device);
esper_status cuda_memory_alloc(void *self, int device, size_t size, uintptr_t *address);
esper_status cuda_memory_free(void *self, int device, uintptr_t address);

/* copies.c */
esper_status cuda_host_alloc(void *self, int device, size_t size, void **memory);
esper_status cuda_host_free(void *self, int device, void *memory);
esper_status cuda_copy_to_host(void *self, int device, void *stream, void *to, uintptr_t from,
                               size_t size);
esper_status cuda_copy_to_device(void *self, int device, void *stream, uintptr_t to,
                                 const void *from, size_t size);
esper_status cuda_memory_zero(void *self, int device, void *stream, uintptr_t address, size_t size);

/* pages.c */
esper_status cuda_page_granularity(void *self, int device, size_t *bytes);
esper_status cuda_range_reserve(void *self, int device, size_t size, uintptr_t *address);
esper_status cuda_range_free(void *self, int device, uintptr_t address, size_t size);
esper_status cuda_page_create(void *self, int device, size_t size, uint64_t *page);
esper_status cuda_page_release(void *self, int device, uint64_t page);
esper_status cuda_page_map(void *self, int device, uintptr_t address, size_t size, uint64_t page,
                           const int *peers, int count);
esper_status cuda_page_unmap(void *self, int device, uintptr_t address, size_t size);
esper_status cuda_page_access(void *self, int device, uintptr_t address, size_t size, int peer);
esper_status cuda_peer_check(void *self, int device, int peer);

/* sharing.c */
esper_status cuda_page_export(void *self, int device, uint64_t page, esper_page_name *name);
esper_status cuda_page_unexport(void *self, int device, const esper_page_name *name);
esper_status cuda_page_import(void *self, int device, const esper_page_name *name, uint64_t *page);

/* streams.c */
esper_status cuda_stream_id(void *self, int device, void *stream, uint64_t *id);
esper_status cuda_stream_capture(void *self, int device, void *stream, uint64_t *capture);
esper_status cuda_stream_create(void *self, int device, void **stream);
esper_status cuda_stream_destroy(void *self, int device, void *stream);
esper_status cuda_stream_wait(void *self, int device, void *stream, void *event);
esper_status cuda_event_create(void *self, int device, void **event);
esper_status cuda_event_destroy(void *self, int device, void *event);
esper_status cuda_event_record(void *self, int device, void *event, void *stream);
esper_status cuda_event_record_all(void *self, int device, void *event);
esper_status cuda_event_query(void *self, int device, void *event);
esper_status cuda_event_synchronize(void *self, int device, void *event);
esper_status cuda_event_wait(void *self, int device, void *event, unsigned microseconds);

/* capture.c */
esper_status cuda_capture_tails(void *self, int device, void *stream, uint64_t capture,
                                void **tails, size_t *count);
esper_status cuda_capture_before(void *self, int device, void *stream, uint64_t capture, void *node,
                                 void **before, size_t *count);

#endif
