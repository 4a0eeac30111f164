/* sleep.c: putting the memory of tags to sleep.
 *
 * The order of a sleep: no more memory is handed out under the tags; the host waits for
 * everything that was enqueued on every device; free pages go back to the driver; the other pages
 * are chosen and marked as asleep; host memory is obtained; then, batch by batch, what is kept is
 * copied to the host and the pages are unmapped, so that copies and driver calls overlap.
 * No device starts copying before all have come that far. Until then an error undoes everything,
 * except that free pages have gone back. A device that then refuses a copy or keeps a page has
 * failed. */

#include <stdlib.h>

#include "../core/base/call.h"
#include "../core/base/error.h"
#include "../core/memory/choose.h"
#include "../core/memory/failure.h"
#include "../core/memory/peers.h"
#include "../core/order/capturing.h"
#include "../core/order/record.h"
#include "../core/requests/drain.h"
#include "../core/requests/release.h"
#include "../esper_sleep.h"
#include "sleeper.h"

/* Pages go in batches of about BATCH bytes, and an event follows the copies of each. While the host
 * unmaps the pages of one batch, the copies of up to WINDOW later ones are under way. */
enum { WINDOW = 4 };
static const size_t BATCH = 32 * MIB;

/* ---- before ------------------------------------------------------------ */

/* Asked before mallocs are refused, so that none of a capture fails for a sleep that is refused
 * anyway. */
static esper_status check_devices(core_t *core)
{
  for (int i = 0; i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    if (!atomic_load(&device->ready))
      continue;
    if (capturing_is_possible_now(device) || stream_any_is_captured(device))
      return error_set(ESPER_CAPTURING,
                       "memory cannot go to sleep while a stream of device %d is being captured: "
                       "end the capture first",
                       i);
  }
  return ESPER_OK;
}

static esper_status wait_for_devices(core_t *core)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++)
    if (atomic_load(&core->devices[i].ready) && RULE(SLEEP_NEEDS_COMPLETION))
      status = drain_device(&core->devices[i], 0);
  return status;
}

static esper_status fit_pinned_memory(const choice_t *c)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < TAGS && status == ESPER_OK; i++)
    if (c->of[i])
      status = sleeper_fit(sleeper_with(c->of[i]), c->device);
  return status;
}

/* ---- page by page ------------------------------------------------------ */

/* Pages from `begin` to `end` of one sleeper, whose copies the record comes after. */
typedef struct batch {
  const sleeper_t *sleeper;
  size_t begin, end;
  record_t *record;
  bool copied;
} batch_t;

typedef struct sending {
  device_t *device;
  presented_t copier;
  batch_t batch[WINDOW]; /* a ring */
  unsigned first, count;
  size_t given_back;
} sending_t;

static esper_status copy_to_host(device_t *device, uintptr_t address, char *host, size_t size)
{
  return call_copy_to_host(device->core, device->index, device->copier->handle, host, address,
                           size);
}

/* Waits for the copies of the oldest batch, and unmaps its pages. */
static void finish_batch(sending_t *g)
{
  const batch_t *b = &g->batch[g->first];
  if (b->copied)
    sleeper_wait_for_copies(g->device, b->record, RULE(UNMAP_AFTER_COPY));
  g->given_back += asleep_unmap(g->device, &b->sleeper->list.pages[b->begin], b->end - b->begin);
  g->first = (g->first + 1) % WINDOW;
  g->count--;
}

static void add_batch(sending_t *g, batch_t batch)
{
  if (g->count == WINDOW)
    finish_batch(g);
  batch.record = batch.copied ? sleeper_record(g->copier) : NULL;
  g->batch[(g->first + g->count++) % WINDOW] = batch;
}

static void send_pages(sending_t *g, const sleeper_t *s)
{
  batch_t batch = {.sleeper = s};
  size_t bytes = 0;
  const sleeping_t *list = &s->list;
  const parcel_t *parcel = list->parcels;
  for (size_t i = 0; i < list->page_count && !device_has_failed(g->device); i++) {
    const sleeping_page_t *page = &list->pages[i];
    for (size_t left = page->parcels; left; left--)
      sleeper_copy(g->device, s, parcel++, copy_to_host);
    batch.copied |= page->parcels > 0;
    bytes += sleeping_page_size(page);
    if (bytes < BATCH && i + 1 < list->page_count)
      continue;
    batch.end = i + 1;
    add_batch(g, batch);
    batch = (batch_t){.sleeper = s, .begin = batch.end};
    bytes = 0;
  }
}

static void send_chosen(const choice_t *c, sending_t *g)
{
  lock(&c->device->sending_lock);
  for (int i = 0; i < TAGS; i++)
    if (c->of[i])
      send_pages(g, sleeper_with(c->of[i]));
  while (g->count)
    finish_batch(g);
  unlock(&c->device->sending_lock);
}

/* ---- sleep ------------------------------------------------------------- */

/* What one call does on one device. */
typedef struct attempt {
  device_t *device;
  bool before[TAGS]; /* what slept already */
  choice_t choice;
  sending_t sending;
  esper_sleep_result result;
} attempt_t;

/* Does all that can fail because memory or a stream is missing. Contents and pages are still
 * there. */
static esper_status prepare_device(attempt_t *a)
{
  /* This also ends stale mappings: a page that is mapped elsewhere, too, would keep its memory. */
  a->result.given_back = release_tagged(a->device, a->choice.tags);
  esper_status status = failure_check(a->device);
  if (status == ESPER_OK)
    status = choose_pages(&a->choice);
  /* If nothing is kept, pinned memory stays as it is: giving it back takes seconds. */
  if (status == ESPER_OK && a->choice.keeps)
    status = fit_pinned_memory(&a->choice);
  if (status == ESPER_OK && a->choice.keeps)
    status = sleeper_stream(a->device, &a->sending.copier);
  return status;
}

static esper_status prepare_all(core_t *core, attempt_t *attempts, int count)
{
  esper_status status = wait_for_devices(core);
  for (int i = 0; i < count && status == ESPER_OK; i++)
    status = prepare_device(&attempts[i]);
  return status;
}

/* Sends the pages of all devices. */
static esper_status send_all(attempt_t *attempts, int count)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < count; i++)
    send_chosen(&attempts[i].choice, &attempts[i].sending);
  for (int i = 0; i < count && status == ESPER_OK; i++)
    status = failure_check(attempts[i].device);
  return status;
}

/* The attempt failed before a page was sent: everything is awake that was, and mallocs are allowed
 * again. */
static void undo(attempt_t *a)
{
  for (int i = 0; i < TAGS; i++)
    if (a->choice.of[i])
      asleep_stay_awake(a->device, a->choice.of[i]);
  asleep_allow(a->device, a->choice.tags, a->before);
}

static void sum_up(attempt_t *a)
{
  for (int i = 0; i < TAGS; i++)
    a->result.kept += a->choice.of[i] ? a->choice.of[i]->kept : 0;
  a->result.given_back += a->sending.given_back;
}

static void add_result(esper_sleep_result *sum, const esper_sleep_result *one)
{
  sum->given_back += one->given_back;
  sum->kept += one->kept;
  for (int i = 0; i < ESPER_STAYS_COUNT; i++)
    sum->stays[i] += one->stays[i];
}

static bool is_meant(const device_t *device, const device_t *only)
{
  return only ? device == only : atomic_load(&device->ready);
}

static esper_status start_all_peers(core_t *core, const device_t *only)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++)
    if (is_meant(&core->devices[i], only))
      status = peers_start(&core->devices[i]);
  return status;
}

static esper_status attempt_all(core_t *core, attempt_t *attempts, int count)
{
  esper_status status = check_devices(core);
  if (status != ESPER_OK)
    return status;
  for (int i = 0; i < count; i++)
    asleep_refuse(attempts[i].device, attempts[i].choice.tags, attempts[i].before);
  status = prepare_all(core, attempts, count);
  for (int i = 0; i < count && status != ESPER_OK; i++)
    undo(&attempts[i]);
  if (status == ESPER_OK)
    status = send_all(attempts, count);
  for (int i = 0; i < count; i++)
    sum_up(&attempts[i]);
  return status;
}

/* `only` NULL: all devices that were used. Adds to the figures of *result. */
static esper_status sleep_devices(core_t *core, const device_t *only, const bool tags[TAGS],
                                  esper_keep keep, esper_sleep_result *result)
{
  int count = 0;
  esper_status status = start_all_peers(core, only);
  if (status != ESPER_OK)
    return status;
  attempt_t *attempts = calloc((size_t)core->device_count, sizeof *attempts);
  if (!attempts)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a sleep of %d devices",
                     core->device_count);
  for (int i = 0; i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    if (!is_meant(device, only))
      continue;
    attempt_t *a = &attempts[count++];
    a->device = a->choice.device = a->sending.device = device;
    a->choice.tags = tags;
    a->choice.keeps = keep == ESPER_KEEP_HOST;
    a->choice.list = sleeper_of;
    a->choice.result = &a->result;
    lock(&device->sleep_lock);
  }
  status = attempt_all(core, attempts, count);
  for (int i = 0; i < count; i++) {
    unlock(&attempts[i].device->sleep_lock);
    if (status == ESPER_OK)
      add_result(result, &attempts[i].result);
  }
  free(attempts);
  return status;
}

/* ---- the public functions ------------------------------------------------ */

esper_status esper_sleep(esper_core *core, int index, const char *const *tags, size_t count,
                         esper_keep keep, esper_sleep_result *result)
{
  bool chosen[TAGS];
  device_t *only = NULL;
  esper_sleep_result sum = {0};
  if (keep != ESPER_KEEP_HOST && keep != ESPER_KEEP_NOTHING)
    return error_set(ESPER_INVALID, "keep is %d: use ESPER_KEEP_HOST or ESPER_KEEP_NOTHING",
                     (int)keep);
  esper_status status = sleeper_tags(tags, count, chosen);
  if (status == ESPER_OK && index != -1)
    status = core_used_device(core, index, &only);
  if (status == ESPER_OK && (index == -1 || only))
    status = sleep_devices(core, only, chosen, keep, &sum);
  if (status == ESPER_OK && result)
    *result = sum;
  return status;
}

void esper_sleep_trim(esper_core *core)
{
  for (int i = 0; i < core->device_count; i++) {
    lock(&core->devices[i].sleep_lock);
    sleepers_trim(&core->devices[i], false);
    unlock(&core->devices[i].sleep_lock);
  }
}

const char *esper_stays_advice(esper_stays reason)
{
  switch (reason) {
  case ESPER_STAYS_CLASSIC:
    return "in classic segments, which the driver gives and takes whole: ask for mapped ones "
           "(ESPER_ALLOC_SEGMENTS=mapped), and use no MemPool with an allocator of its own";
  case ESPER_STAYS_SHARED:
    return "shared with other processes: let them close it, and free it here";
  case ESPER_STAYS_PINNED: return "pinned, because its addresses are known elsewhere: unpin it";
  case ESPER_STAYS_IN_USE:
    return "in use by another thread's call, or by work that was enqueued meanwhile: let no thread "
           "allocate, free or launch while memory goes to sleep";
  case ESPER_STAYS_COUNT: break;
  }
  return "unknown reason";
}
