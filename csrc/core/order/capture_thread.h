/* capture_thread.h: which capture the calling thread works in, as far as its calls tell.
 *
 * The body of a conditional node is a graph of its own. A block that is freed while a body is
 * captured serves nobody in the outer graph, because the body may run later. The driver
 * cannot be asked which graph a thread is filling, so each call notes what it saw. */
#ifndef ESPER_CAPTURE_THREAD_H
#define ESPER_CAPTURE_THREAD_H

#include "stream.h"

/* Notes that the calling thread works on that stream inside that capture. */
void capture_thread_note(uint64_t capture, stream_t *stream);
/* Notes that it works on a stream, and that the driver refuses to say whether that is captured. */
void capture_thread_refused(const core_t *core);

/* Whether the thread may be filling another graph than that of `capture`. */
bool capture_thread_may_be_elsewhere(const core_t *core, uint64_t capture);

#endif
