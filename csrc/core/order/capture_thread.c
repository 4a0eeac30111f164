#include "capture_thread.h"

#include "capturing.h"

/* The capture that the thread worked in last, and a stream of that capture. CAPTURE_UNKNOWN: the
 * driver did not say which. No stream: capture_thread_refused was called last. */
static _Thread_local struct {
  uint64_t core; /* the serial number of the stream's core */
  uint64_t capture;
  stream_t *stream;
} thread;

void capture_thread_note(uint64_t capture, stream_t *stream)
{
  thread.core = stream->core->serial;
  thread.capture = capture;
  thread.stream = stream;
}

void capture_thread_refused(const core_t *core)
{
  thread.core = core->serial;
  thread.stream = NULL;
}

bool capture_thread_may_be_elsewhere(const core_t *core, uint64_t capture)
{
  stream_t *s = thread.stream;
  if (thread.core != core->serial)
    return false;
  if (!s)
    return true;
  if (thread.capture == capture || !s->immortal)
    return false;
  uint64_t now = stream_capture_of((presented_t){.stream = s, .handle = s->handle}, true);
  return now == thread.capture || now == CAPTURE_UNKNOWN ||
         (thread.capture == CAPTURE_UNKNOWN && now && now != capture);
}
