#include "sleep.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "../memory/asleep.h"
#include "../memory/in_flight.h"
#include "../memory/mapped.h"
#include "../memory/page_table.h"
#include "../memory/peers.h"
#include "../order/capturing.h"
#include "../order/host_wait.h"
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
  record_t *record; /* NULL: nothing was copied */
} batch_t;

typedef struct going {
  device_t *device;
  presented_t copier;
  batch_t batch[WINDOW]; /* a ring */
  unsigned first, count;
  size_t given_back;
  bool copies_may_run; /* nothing says when some copies are done */
  esper_status status; /* the first failure */
} going_t;

static esper_status copy_to_host(device_t *device, uintptr_t address, char *host, size_t size)
{
  return call_copy_to_host(device->core, device->index, device->copier->handle, host, address,
                           size);
}

static esper_status copy_page(const going_t *g, const sleeper_t *s, size_t parcel, size_t end)
{
  esper_status status = ESPER_OK;
  for (; parcel < end && status == ESPER_OK; parcel++)
    status = sleeper_copy(g->device, s, &s->parcels[parcel], copy_to_host);
  return status;
}

static void note_failure(going_t *g, esper_status status)
{
  if (g->status == ESPER_OK)
    g->status = status;
}

static void unmap_page(going_t *g, sleeping_page_t *page)
{
  page_t *entry = sleeping_page_entry(page);
  if (mapped_give_back(page->segment, entry)) {
    g->given_back += page_size(page->segment, entry);
    sleeping_page_set(page, 0, true);
  } else {
    page->awake = true;
    note_failure(g, ESPER_DEVICE_ERROR);
  }
}

/* Waits for the copies of the oldest batch, and unmaps its pages. */
static void finish_batch(going_t *g)
{
  batch_t *b = &g->batch[g->first];
  esper_status status = ESPER_OK;
  if (b->record && RULE(UNMAP_AFTER_COPY))
    status = record_wait(b->record);
  if (b->record)
    record_drop(b->record);
  if (status != ESPER_OK) {
    g->copies_may_run = true;
    note_failure(g, status);
  }
  paging_begin(g->device); /* not while copies are waited for: others wait for the lock */
  for (size_t i = b->begin; i < b->end; i++) {
    sleeping_page_t *page = &b->sleeper->pages[i];
    if (status != ESPER_OK)
      page->awake = true;
    else if (!page->awake)
      unmap_page(g, page);
  }
  paging_end(g->device);
  g->first = (g->first + 1) % WINDOW;
  g->count--;
}

static void add_batch(going_t *g, batch_t batch, bool copied)
{
  if (g->count == WINDOW)
    finish_batch(g);
  if (copied && !(batch.record = stream_record(g->copier))) {
    g->copies_may_run = true; /* so the pages stay */
    for (size_t i = batch.begin; i < batch.end; i++)
      batch.sleeper->pages[i].awake = true;
    note_failure(g, ESPER_DEVICE_ERROR);
  }
  g->batch[(g->first + g->count++) % WINDOW] = batch;
}

static void send_pages(going_t *g, sleeper_t *s, size_t first_page, size_t first_parcel)
{
  batch_t batch = {.sleeper = s, .begin = first_page};
  size_t bytes = 0, parcel = first_parcel;
  bool copied = false;
  for (size_t i = first_page; i < s->page_count; i++) {
    sleeping_page_t *page = &s->pages[i];
    esper_status status = copy_page(g, s, parcel, parcel + page->parcels);
    if (status != ESPER_OK) {
      page->awake = true;
      note_failure(g, status);
    }
    copied |= page->parcels > 0;
    parcel += page->parcels;
    bytes += page_size(page->segment, sleeping_page_entry(page));
    if (bytes < BATCH && i + 1 < s->page_count)
      continue;
    batch.end = i + 1;
    add_batch(g, batch, copied);
    batch.begin = batch.end;
    bytes = 0;
    copied = false;
  }
}

static void send_chosen(const choice_t *c, going_t *g)
{
  lock(&c->device->lock);
  in_flight_begin(c->device);
  unlock(&c->device->lock);
  for (int i = 0; i < TAGS; i++)
    if (c->of[i])
      send_pages(g, c->of[i], 0, 0);
  while (g->count)
    finish_batch(g);
  if (g->copies_may_run) /* soon the memory may be freed, and the pinned memory given back */
    drain_at_any_cost(c->device);
  lock(&c->device->lock);
  in_flight_note_return(c->device);
  in_flight_end(c->device);
  unlock(&c->device->lock);
}

/* ---- sleep ------------------------------------------------------------- */

/* Free blocks that lie on no page that sleeps are free again. */
static void wake_free_blocks(segment_t *s)
{
  for (block_t *b = s->first, *after; b; b = after) {
    after = b->next;
    if (after && after->state == BLOCK_READY) /* it may become one with the block */
      after = after->next;
    if (b->state == BLOCK_ASLEEP && !pages_sleep_under(b))
      asleep_free_wakes(b);
  }
}

/* The pages of a sleeper that stay are awake again. Returns their bytes. */
static size_t keep_awake(const choice_t *c, sleeper_t *s, bool all)
{
  size_t bytes = 0;
  paging_begin(c->device); /* not while another thread names pages */
  lock(&c->device->lock);
  caches_close(c->device);
  for (size_t i = 0; i < s->page_count; i++) {
    sleeping_page_t *page = &s->pages[i];
    page->awake |= all;
    if (!page->awake)
      continue;
    page_t entry = *sleeping_page_entry(page);
    entry.empty = false;
    bytes += page_size(page->segment, &entry);
    asleep_set(page->segment, entry, false);
  }
  for (segment_t *segment = c->device->first_segment; segment && bytes; segment = segment->next)
    if (segment->pages && segment->heap->tag == s->tag)
      wake_free_blocks(segment);
  unlock(&c->device->lock);
  paging_end(c->device);
  sleeper_forget_awake(s);
  return bytes;
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
  if (!mapped_reap(a->device)) /* pages would be mapped elsewhere, too, and keep their memory */
    return ESPER_DEVICE_ERROR;
  a->result.given_back = release_tagged(a->device, a->choice.tags);
  esper_status status = choose_pages(&a->choice);
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

/* Sends the pages of all devices. Fails only if a driver refused and none took anything back. */
static esper_status send_all(attempt_t *attempts, int count)
{
  size_t given_back = 0;
  esper_status status = ESPER_OK;
  for (int i = 0; i < count; i++) {
    going_t *g = &attempts[i].going;
    send_chosen(&attempts[i].choice, g);
    given_back += g->given_back;
    if (status == ESPER_OK)
      status = g->status;
  }
  return given_back ? ESPER_OK : status;
}

/* Pages that could not go are awake again, and the result is summed up. After a failure mallocs are
 * allowed again. */
static void conclude(attempt_t *a, esper_status status)
{
  for (int i = 0; i < TAGS; i++) {
    sleeper_t *sleeper = a->choice.of[i];
    if (!sleeper)
      continue;
    a->result.stays[ESPER_STAYS_REFUSED] += keep_awake(&a->choice, sleeper, status != ESPER_OK);
    a->result.kept += sleeper->kept;
  }
  a->result.given_back += a->going.given_back;
  if (status != ESPER_OK)
    allow_mallocs(a->device, a->choice.tags, a->before);
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
  if (status == ESPER_OK)
    status = send_all(attempts, count);
  for (int i = 0; i < count; i++)
    conclude(&attempts[i], status);
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
