#include "hold_back.h"

#include "../base/call.h"
#include "../base/monotonic.h"
#include "../blocks/block.h"
#include "../blocks/trace.h"
#include "../blocks/use.h"
#include "../order/capturing.h"
#include "../order/host_wait.h"
#include "../order/record.h"
#include "../order/retire.h"
#include "../pools/source.h"
#include "drain.h"

enum {
  ALLOWANCE = 128 << 20,
  RECENT = 2 /* blocks */
};

bool call_free_memory(const request_t *q, bool short_of_memory)
{
  static _Thread_local bool called;
  const esper_config *given = &q->config->as_given;
  if (!given->free_memory || called)
    return false;
  called = true;
  embedder_callbacks++;
  bool freed = given->free_memory(given->free_memory_context, short_of_memory);
  embedder_callbacks--;
  called = false;
  return freed;
}

size_t allowance_given(core_t *core)
{
  size_t given = config_of(core)->as_given.allowance;
  if (given == ESPER_ALLOWANCE_OFF)
    return SIZE_MAX;
  return given ? given : ALLOWANCE;
}

size_t allowance_of(const heap_t *heap)
{
  size_t given = allowance_given(heap->device->core);
  return given == SIZE_MAX ? SIZE_MAX : given << heap->allowance_doubled;
}

/* ---- what is waited for ------------------------------------------------ */

/* The record that a pending block of the request's size class waits for. NULL: the host does not
 * wait for it. */
static record_t *awaited(const request_t *q, const block_t *block)
{
  return block->segment->large == q->large ? block_awaits(block, q->heap->stream) : NULL;
}

/* The oldest pending block that is too recent to wait for. Too recent are the two newest, as many
 * as fit into the allowance, and each that is larger than all newer ones: or the GPU would have to
 * finish a layer's large tensor before the next layer could be prepared. NULL: none is older. */
static const block_t *oldest_recent(const request_t *q, size_t allowance)
{
  size_t newer = 0, found = 0;
  bool older = false; /* the last one looked at, which is the oldest */
  const block_t *recent = NULL;
  for (const block_t *b = q->heap->newest_pending; b; b = b->older)
    if (awaited(q, b)) {
      older = found >= RECENT && newer >= b->size && q->size + newer + b->size > allowance;
      if (!older)
        recent = b;
      newer += b->size;
      found++;
    }
  return older ? recent : NULL;
}

/* The oldest work that pending memory waits for, with a reference. `mindful`: NULL if what is
 * pending is within the allowance. */
static record_t *oldest_work(const request_t *q, bool mindful)
{
  record_t *oldest = NULL;
  lock(&q->device->lock);
  size_t allowance = allowance_of(q->heap);
  const block_t *end = mindful && allowance != SIZE_MAX ? oldest_recent(q, allowance) : NULL;
  for (block_t *b = !mindful || end ? q->heap->oldest_pending : NULL; b != end && !oldest;
       b = b->newer)
    oldest = awaited(q, b);
  if (oldest)
    record_keep(oldest);
  unlock(&q->device->lock);
  return oldest;
}

unsigned most_waits(const request_t *q)
{
  lock(&q->device->lock);
  unsigned most = (unsigned)q->heap->pending[q->large].count;
  unlock(&q->device->lock);
  return most;
}

/* ---- whether the wait left the GPU without work -------------------------- */

/* The ends of the queues of the stream that is waited for and of the request's, before the wait. */
typedef struct ends {
  record_t *of[2]; /* NULL: not known */
} ends_t;

/* The legacy stream cannot be asked while another one may be captured. */
static ends_t find_ends(const request_t *q, const record_t *awaited)
{
  if (capturing_is_possible_now(q->device))
    return (ends_t){{NULL, NULL}};
  presented_t now = q->presented;
  now.asked = false; /* a capture may have begun while the host waited */
  return (ends_t){{stream_record_unpresented(awaited->stream), stream_record(now)}};
}

/* The end of a mortal stream is not known, so it counts as reached. The driver may report an
 * event a moment after the work before it, so it is asked several times. */
static bool are_reached(ends_t ends)
{
  enum { QUESTIONS = 8 };
  bool reached = ends.of[1] != NULL;
  for (int i = 0; i < 2 && reached; i++) {
    const record_t *end = ends.of[i];
    for (int k = 0; k < QUESTIONS && end && !stream_completed(end->stream, end->number); k++)
      stream_retire(end->stream);
    reached = !end || stream_completed(end->stream, end->number);
  }
  return reached;
}

static void drop_ends(ends_t ends)
{
  for (int i = 0; i < 2; i++)
    if (ends.of[i])
      record_drop(ends.of[i]);
}

/* The wait emptied the queues of both streams. If nothing is pending any more either, the allowance
 * was too small. Raises it, but not beyond what the device has left. */
static void raise_allowance(const request_t *q)
{
  device_t *d = q->device;
  stream_retire_all(q->core);
  record_t *more = oldest_work(q, false);
  if (more) {
    record_drop(more);
    return;
  }
  lock(&d->lock);
  size_t most = d->limit < d->total ? d->limit : d->total;
  size_t reserved = (size_t)d->stats.reserved_bytes[ESPER_ALL].current;
  if (reserved < most && allowance_of(q->heap) <= (most - reserved) / 2)
    q->heap->allowance_doubled++;
  unlock(&d->lock);
}

/* ---- waiting ------------------------------------------------------------- */

static void wait_unlocked(const request_t *q, void (*wait)(void *), void *argument)
{
  void (*while_waiting)(void (*)(void *), void *) = q->config->as_given.while_waiting;
  if (while_waiting)
    while_waiting(wait, argument);
  else
    wait(argument);
}

typedef struct host_wait {
  const request_t *q;
  record_t *record; /* of wait() */
  unsigned how;     /* of drain() */
  esper_status status;
} host_wait_t;

static void wait(void *argument)
{
  host_wait_t *w = argument;
  if (RULE(NEVER_WAITS)) {
    w->status = record_wait_trusting(w->record);
  } else { /* the request's stream waits, on the GPU */
    w->status =
        call_stream_wait(w->q->core, w->q->device->index, w->q->presented.handle, w->record->event);
    stream_declare_completed(w->record->stream, w->record->number);
  }
}

static esper_status wait_and_drop(const request_t *q, record_t *record)
{
  host_wait_t w = {.q = q, .record = record};
  wait_unlocked(q, wait, &w);
  record_drop(record);
  return w.status;
}

static void drain(void *argument)
{
  host_wait_t *w = argument;
  w->status = drain_device(w->q->device, w->how);
}

esper_status drain_without_embedder(const request_t *q, unsigned how)
{
  host_wait_t w = {.q = q, .how = how};
  wait_unlocked(q, drain, &w);
  return w.status;
}

static void wait_for_sending(void *argument)
{
  device_t *device = argument;
  lock(&device->sending_lock);
  unlock(&device->sending_lock);
}

void wait_for_sleep_without_embedder(const request_t *q)
{
  wait_unlocked(q, wait_for_sending, q->device);
}

bool wait_for_oldest(const request_t *q)
{
  record_t *oldest = oldest_work(q, false);
  return oldest && wait_and_drop(q, oldest) == ESPER_OK;
}

bool hold_back(const request_t *q)
{
  record_t *oldest = q->capture || embedder_callbacks ? NULL : oldest_work(q, true);
  if (!oldest)
    return false;
  uint64_t begin = monotonic_now();
  ends_t ends = find_ends(q, oldest);
  esper_status status = wait_and_drop(q, oldest);
  if (status == ESPER_OK && are_reached(ends))
    raise_allowance(q);
  drop_ends(ends);
  uint64_t lasted = monotonic_now() - begin;
  lock(&q->device->lock);
  q->device->counters.held_back++;
  q->device->counters.held_back_us += lasted;
  q->device->counters.held_back_in_vain += status == ESPER_NOT_READY;
  trace_record(q->device, ESPER_TRACE_HELD_BACK, lasted, q->asked, q->presented.stream);
  unlock(&q->device->lock);
  return status == ESPER_OK;
}
