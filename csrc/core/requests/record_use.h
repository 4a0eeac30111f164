/* record_use.h: record_use and record_stream. */
#ifndef ESPER_RECORD_USE_H
#define ESPER_RECORD_USE_H

#include "../order/stream.h"

/* The functions of esper_alloc.h, after their arguments were checked. */
esper_status mark_use(core_t *core, const void *const *ptrs, size_t count, esper_stream as,
                      unsigned flags, size_t *marked);
/* As mark_use, for one block that starts at the address and was found without a lock. The block,
 * and even its metadata, may have gone since. */
esper_status mark_found_block(block_t *block, const void *ptr, presented_t p, size_t *found);
/* Marks a use on a stream of which the caller knows only the driver's handle, which is above 2.
 * False: the handle is not enough, and nothing has happened. */
bool mark_by_handle(core_t *core, const void *ptr, void *handle, esper_status *status);
esper_status mark_use_event(core_t *core, const void *const *ptrs, size_t count, void *event,
                            int device, size_t *marked);
esper_status mark_stream(core_t *core, const void *ptr, esper_stream as);
esper_status mark_until_all_done(core_t *core, const void *ptr);

/* ---- for note_use.c ------------------------------------------------------ */

/* Presents a stream that the caller marks on. If that fails, notes that the thread may be filling
 * an unknown graph (capture_thread.h). */
esper_status mark_present(core_t *core, esper_stream as, presented_t *p);
/* Adds a use to a live block, under the lock of its device. Takes over the reference to the
 * record. */
esper_status mark_attach(block_t *block, stream_t *stream, record_t *record, unsigned flags);
/* The same on all streams of all devices that the core uses, without a record. */
esper_status mark_on_all_streams(block_t *block, unsigned flags);

#endif
