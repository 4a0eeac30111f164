#include "sleep.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "../memory/asleep.h"
#include "../memory/failure.h"
#include "../memory/mapped.h"
#include "../memory/page_table.h"
#include "../memory/peers.h"
#include "../order/capturing.h"
#include "../order/record.h"
#include "../requests/drain.h"
#include "../requests/release.h"
#include "choose.h"
#include "sleeper.h"

/* Copies of about BATCH bytes are followed by an event. While the host unmaps the pages of one
 * batch, the copies of the next WINDOW - 1 are under way. */
enum { WINDOW = 4 };
static const size_t BATCH = 32 * MIB;

/* ---- before ------------------------------------------------------------ */

/* Asked before mallocs are refused: those of a capture must not fail for nothing. */
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

/* From now on no memory is handed out under the tags. *before becomes what slept already. */
static void refuse_mallocs(device_t *device, const bool tags[TAGS], bool before[TAGS])
{
  lock(&device->lock);
  caches_close(device);
  for (int i = 0; i < TAGS; i++) {
    before[i] = device->asleep[i];
    device->asleep[i] |= tags[i];
    if (tags[i] && !before[i])
      atomic_fetch_add(&device->core->asleep, 1);
  }
  unlock(&device->lock);
}

static void allow_mallocs(device_t *device, const bool tags[TAGS], const bool before[TAGS])
{
  lock(&device->lock);
  for (int i = 0; i < TAGS; i++)
    if (tags[i] && !before[i]) {
      device->asleep[i] = false;
      atomic_fetch_sub(&device->core->asleep, 1);
    }
  unlock(&device->lock);
}

static esper_status fit_pinned_memory(const choice_t *c)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < TAGS && status == ESPER_OK; i++)
    if (c->of[i])
      status = pinned_memory_fit(&c->of[i]->pinned, c->device, c->of[i]->kept);
  return status;
}

/* ---- page by page ------------------------------------------------------ */

/* Pages from `begin` to `end` of one sleeper, whose copies the record comes after. */
typedef struct batch {
  sleeper_t *sleeper;
  size_t begin, end;
  record_t *record;
  bool copied;
} batch_t;

typedef struct going {
  device_t *device;
  presented_t copier;
  batch_t batch[WINDOW]; /* a ring */
  unsigned first, count;
  size_t given_back;
} going_t;

static esper_status copy_to_host(device_t *device, uintptr_t address, char *host, size_t size)
{
  return call_copy_to_host(device->core, device->index, device->copier->handle, host, address,
                           size);
}

static void unmap_page(going_t *g, const sleeping_page_t *page)
{
  const page_t *entry = sleeping_page_entry(page);
  mapped_give_back(page->segment, entry);
  g->given_back += page_size(page->segment, entry);
  sleeping_page_set(page, 0, true);
}

/* Waits for the copies of the oldest batch, and unmaps its pages. */
static void finish_batch(going_t *g)
{
  const batch_t *b = &g->batch[g->first];
  if (b->copied)
    sleeper_wait_for_copies(g->device, b->record, RULE(UNMAP_AFTER_COPY));
  lock(&g->device->growth_lock); /* not while copies are waited for: others may grow */
  for (size_t i = b->begin; i < b->end && !device_has_failed(g->device); i++)
    unmap_page(g, &b->sleeper->pages[i]);
  unlock(&g->device->growth_lock);
  g->first = (g->first + 1) % WINDOW;
  g->count--;
}

static void add_batch(going_t *g, batch_t batch)
{
  if (g->count == WINDOW)
    finish_batch(g);
  batch.record = batch.copied ? stream_record(g->copier) : NULL;
  g->batch[(g->first + g->count++) % WINDOW] = batch;
}

static void send_pages(going_t *g, sleeper_t *s)
{
  batch_t batch = {.sleeper = s};
  size_t bytes = 0;
  const parcel_t *parcel = s->parcels;
  for (size_t i = 0; i < s->page_count && !device_has_failed(g->device); i++) {
    const sleeping_page_t *page = &s->pages[i];
    for (size_t left = page->parcels; left; left--)
      sleeper_copy(g->device, s, parcel++, copy_to_host);
    batch.copied |= page->parcels > 0;
    bytes += page_size(page->segment, sleeping_page_entry(page));
    if (bytes < BATCH && i + 1 < s->page_count)
      continue;
    batch.end = i + 1;
    add_batch(g, batch);
    batch = (batch_t){.sleeper = s, .begin = batch.end};
    bytes = 0;
  }
}

static void send_chosen(const choice_t *c, going_t *g)
{
  lock(&c->device->sending_lock);
  for (int i = 0; i < TAGS; i++)
    if (c->of[i])
      send_pages(g, c->of[i]);
  while (g->count)
    finish_batch(g);
  unlock(&c->device->sending_lock);
}

/* ---- sleep ------------------------------------------------------------- */

/* The pages of a sleeper are awake again, because the sleep ended before it began with them. */
static void keep_awake(const choice_t *c, sleeper_t *s)
{
  lock(&c->device->growth_lock); /* not while another thread names pages */
  lock(&c->device->lock);
  caches_close(c->device);
  for (size_t i = 0; i < s->page_count; i++)
    sleeping_page_wakes(&s->pages[i]);
  for (segment_t *segment = c->device->first_segment; segment; segment = segment->next)
    if (segment->pages && segment->heap->tag == s->tag)
      asleep_free_blocks_wake(segment, false);
  unlock(&c->device->lock);
  unlock(&c->device->growth_lock);
  sleeper_clear(s);
}

/* What one call does on one device. */
typedef struct attempt {
  device_t *device;
  bool before[TAGS]; /* what slept already */
  choice_t choice;
  going_t going;
  esper_sleep_result result;
} attempt_t;

/* Does all that can fail because memory or a stream is missing. Contents and pages are still
 * there. */
static esper_status prepare(attempt_t *a)
{
  /* Stale pages go as well: they would be mapped elsewhere, and keep their memory. */
  a->result.given_back = release_tagged(a->device, a->choice.tags);
  esper_status status = failure_check(a->device);
  if (status == ESPER_OK)
    status = choose_pages(&a->choice);
  /* If nothing is kept, pinned memory stays as it is: to give it back takes seconds. */
  if (status == ESPER_OK && a->choice.keeps)
    status = fit_pinned_memory(&a->choice);
  if (status == ESPER_OK && a->choice.keeps)
    status = sleeper_stream(a->device, &a->going.copier);
  return status;
}

static esper_status prepare_all(core_t *core, attempt_t *attempts, int count)
{
  esper_status status = wait_for_devices(core);
  for (int i = 0; i < count && status == ESPER_OK; i++)
    status = prepare(&attempts[i]);
  return status;
}

/* Sends the pages of all devices. */
static esper_status send_all(attempt_t *attempts, int count)
{
  esper_status status = ESPER_OK;
  for (int i = 0; i < count; i++)
    send_chosen(&attempts[i].choice, &attempts[i].going);
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
      keep_awake(&a->choice, a->choice.of[i]);
  allow_mallocs(a->device, a->choice.tags, a->before);
}

static void sum_up(attempt_t *a)
{
  for (int i = 0; i < TAGS; i++)
    a->result.kept += a->choice.of[i] ? a->choice.of[i]->kept : 0;
  a->result.given_back += a->going.given_back;
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
    refuse_mallocs(attempts[i].device, attempts[i].choice.tags, attempts[i].before);
  status = prepare_all(core, attempts, count);
  for (int i = 0; i < count && status != ESPER_OK; i++)
    undo(&attempts[i]);
  if (status == ESPER_OK)
    status = send_all(attempts, count);
  for (int i = 0; i < count; i++)
    sum_up(&attempts[i]);
  return status;
}

esper_status sleep_devices(core_t *core, const device_t *only, const bool tags[TAGS],
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
    a->device = a->choice.device = a->going.device = device;
    a->choice.tags = tags;
    a->choice.keeps = keep == ESPER_KEEP_HOST;
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
