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
  DOUBLINGS = 16
};

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

bool stream_is_trusted(const stream_t *s)
{
  uint64_t until = atomic_load_explicit(&s->distrusted_until, memory_order_relaxed);
  return !until || monotonic_now() >= until || !RULE(WAITS_IN_VAIN_ARE_RARE);
}

static void distrust(stream_t *s, uint64_t lost)
{
  unsigned before = atomic_load(&s->waits_in_vain);
  if (before < DOUBLINGS)
    atomic_store(&s->waits_in_vain, before + 1);
  atomic_store(&s->distrusted_until, monotonic_now() + (REST * (lost + SLICE) << before));
}

static void trust(stream_t *s)
{
  unsigned before = atomic_load_explicit(&s->waits_in_vain, memory_order_relaxed);
  if (before)
    atomic_store(&s->waits_in_vain, before - 1);
}

static esper_status wait_within(record_t *record, int most)
{
  core_t *core = record->stream->core;
  esper_status status = ESPER_NOT_READY;
  for (int slices = 0, idle = 0; status == ESPER_NOT_READY && idle < PATIENCE && slices < most;
       slices++) {
    uint64_t before = atomic_load(&core->completions);
    status = wait_for(record, true);
    if (status == ESPER_NOT_READY)
      stream_retire_all(core);
    idle = atomic_load(&core->completions) == before ? idle + 1 : 0;
  }
  return status;
}

esper_status record_wait_limited(record_t *record)
{
  return wait_within(record, INT_MAX);
}

esper_status record_wait_trusting(record_t *record)
{
  stream_t *s = record->stream;
  if (!stream_is_trusted(s))
    return stream_completes_now(s, record->number) ? ESPER_OK : ESPER_NOT_READY;
  uint64_t begin = monotonic_now(), until = atomic_load(&s->distrusted_until);
  esper_status status = wait_within(record, MOST);
  if (status == ESPER_OK)
    trust(s);
  else if (status == ESPER_NOT_READY && atomic_load(&s->distrusted_until) == until)
    distrust(s, monotonic_now() - begin); /* once, however many threads waited */
  return status;
}
