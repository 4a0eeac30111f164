#include "host_wait.h"

#include <limits.h>

#include "../base/call.h"
#include "../base/monotonic.h"
#include "../base/error.h"
#include "record.h"
#include "retire.h"

enum {
  SLICE = 10000,  /* microseconds; after each one the other streams are asked */
  PATIENCE = 100, /* slices in a row in which nothing completes: the GPU may be at a long kernel */
  MOST = 1000,    /* slices in all: what completes may have nothing to do with the awaited work */
  REST = 40,      /* so that waits in vain take a fortieth of the time */
  CREDIT = 2 * PATIENCE * SLICE /* that may be lost with streams that are not known yet */
};

/* How the last trusting wait for a stream ended. */
enum { NEVER_AWAITED, WORKED, IN_VAIN };

static esper_status wait_for(record_t *record, bool limited)
{
  stream_t *s = record->stream;
  esper_status status = ESPER_OK;
  /* The pin keeps the event with its record: retiring raises `completed` first, and looks at the
   * pins afterwards. */
  atomic_fetch_add(&record->pins, 1);
  if (!stream_completed(s, record->number))
    status = limited && RULE(WAITS_END)
                 ? call_event_wait(s->core, s->device->index, record->event, SLICE)
                 : call_event_synchronize(s->core, s->device->index, record->event);
  atomic_fetch_sub(&record->pins, 1);
  if (status == ESPER_OK)
    stream_declare_completed(s, record->number);
  else if (status != ESPER_NOT_READY)
    error_from_driver(s->core, status);
  return status;
}

esper_status record_wait(record_t *record)
{
  return wait_for(record, false);
}

bool stream_may_be_awaited(const stream_t *s)
{
  uint64_t until = atomic_load_explicit(&s->device->rests_until, memory_order_relaxed);
  int last = atomic_load_explicit(&s->last_wait, memory_order_relaxed);
  return !until || last == WORKED || !RULE(WAITS_IN_VAIN_ARE_RARE) ||
         monotonic_now() + (last == NEVER_AWAITED ? REST * CREDIT : 0) >= until;
}

/* `until`: when the rest was to end as the wait began. The time counts once, however many threads
 * waited. */
static void rest(stream_t *s, uint64_t lost, uint64_t until)
{
  uint64_t now = monotonic_now(), from = until > now ? until : now;
  atomic_store(&s->last_wait, IN_VAIN);
  atomic_compare_exchange_strong(&s->device->rests_until, &until, from + REST * (lost + SLICE));
}

esper_status record_wait_limited(record_t *record)
{
  core_t *core = record->stream->core;
  esper_status status = ESPER_NOT_READY;
  for (int slices = 0, idle = 0; status == ESPER_NOT_READY && idle < PATIENCE && slices < MOST;
       slices++) {
    uint64_t before = atomic_load(&core->completions);
    status = wait_for(record, true);
    if (status == ESPER_NOT_READY)
      stream_retire_all(core);
    idle = atomic_load(&core->completions) == before ? idle + 1 : 0;
  }
  return status;
}

esper_status record_wait_trusting(record_t *record)
{
  stream_t *s = record->stream;
  if (!stream_may_be_awaited(s))
    return stream_completes_now(s, record->number) ? ESPER_OK : ESPER_NOT_READY;
  uint64_t begin = monotonic_now(), until = atomic_load(&s->device->rests_until);
  esper_status status = record_wait_limited(record);
  if (status == ESPER_OK)
    atomic_store_explicit(&s->last_wait, WORKED, memory_order_relaxed);
  else if (status == ESPER_NOT_READY)
    rest(s, monotonic_now() - begin, until);
  return status;
}
