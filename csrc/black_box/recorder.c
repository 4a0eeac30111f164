#include "recorder.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "carried.h"
#include "chunks.h"
#include "lanes.h"
#include "lock.h"
#include "out.h"
#include "sites.h"

static const uint64_t no_pool[2];
static atomic_ullong lost;
static _Atomic(esper_core *) recorded; /* NULL: nothing is */
static _Atomic(box_site_fn *) site_here;
static _Atomic(box_node_fn *) node_here;
static uint64_t begin_ticks, begin_ns, begin_monotonic; /* the time of day may be set */

/* ---- recording -------------------------------------------------------------- */

/* The calling thread's, for an event at this address. NULL: the event is lost. */
static inline chunk_t *chunk_here(uint64_t now, uint64_t address)
{
  chunk_t *chunk = address >> (ADDRESS_BITS + ADDRESS_SHIFT) ? NULL : chunk_for(now);
  if (__builtin_expect(!chunk, 0))
    atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed);
  return chunk;
}

static inline void add(chunk_t *chunk, uint64_t now, unsigned kind, uint64_t address,
                       uint64_t second)
{
  chunk_add(chunk, box_first(kind, now - chunk->from, address), second);
}

__attribute__((noinline)) static unsigned site_of_node(void)
{
  box_node_fn *node = atomic_load_explicit(&node_here, memory_order_relaxed);
  uint64_t hash;
  char name[256];
  if (!node || !node(&hash, NULL, 0))
    return 0;
  unsigned site = site_find(hash);
  if (!site && node(&hash, name, sizeof name))
    site = site_add(hash, name, strlen(name));
  return site;
}

unsigned box_site_here(void)
{
  box_site_fn *find = atomic_load_explicit(&site_here, memory_order_relaxed);
  unsigned site = find ? find() : 0;
  return site ? site : site_of_node();
}

/* Threads seldom change their stream. */
static inline unsigned lane_here(chunk_t *chunk, int device, void *stream)
{
  if (chunk->stream != stream || chunk->device != device) {
    chunk->lane = lane_of(device, stream, no_pool);
    chunk->stream = stream;
    chunk->device = device;
  }
  return chunk->lane;
}

static inline void add_at_site(unsigned kind, const void *ptr, size_t size, esper_stream stream)
{
  unsigned site = box_site_here(); /* code of the interpreter may run, which frees tensors */
  uint64_t now = clock_ticks();
  chunk_t *chunk = chunk_here(now, (uintptr_t)ptr);
  if (chunk)
    add(chunk, now, kind, (uintptr_t)ptr,
        box_second(size, lane_here(chunk, stream.device, stream.handle), site));
}

static void allocated(const void *ptr, size_t size, esper_stream stream)
{
  add_at_site(BOX_ALLOC, ptr, size, stream);
}

static void freed(const void *ptr)
{
  uint64_t now = clock_ticks();
  chunk_t *chunk = chunk_here(now, (uintptr_t)ptr);
  if (chunk)
    add(chunk, now, BOX_FREE, (uintptr_t)ptr, 0);
}

static void used(const void *ptr, esper_stream stream)
{
  add_at_site(BOX_USE, ptr, 0, stream);
}

static unsigned kind_of(esper_action action)
{
  switch (action) {
  case ESPER_TRACE_ALLOC: return BOX_ALLOC;
  case ESPER_TRACE_FREE_REQUESTED: return BOX_FREE;
  case ESPER_TRACE_SEGMENT_ALLOC: return BOX_SEGMENT_ALLOC;
  case ESPER_TRACE_SEGMENT_FREE: return BOX_SEGMENT_FREE;
  case ESPER_TRACE_SEGMENT_MAP: return BOX_SEGMENT_MAP;
  case ESPER_TRACE_SEGMENT_UNMAP: return BOX_SEGMENT_UNMAP;
  case ESPER_TRACE_OOM: return BOX_OOM;
  case ESPER_TRACE_PENDING: return BOX_PENDING;
  case ESPER_TRACE_AVAILABLE: return BOX_AVAILABLE;
  case ESPER_TRACE_HELD_BACK: return BOX_HELD_BACK;
  case ESPER_TRACE_FREE_COMPLETED:
  case ESPER_TRACE_SNAPSHOT: break;
  }
  return BOX_NONE;
}

/* Under the core's lock. Finding the place in a program may run code of the interpreter, which must
 * not happen here. */
static void told(const esper_trace_entry *entry)
{
  unsigned kind = kind_of(entry->action);
  if (kind == BOX_NONE)
    return;
  uint64_t address = entry->address, second = 0;
  if (kind == BOX_HELD_BACK)
    address <<= ADDRESS_SHIFT;
  if (box_words(kind) == 2)
    second = box_second(entry->size, lane_of(entry->device, entry->stream, entry->pool), 0);
  uint64_t now = clock_ticks();
  chunk_t *chunk = chunk_here(now, address);
  if (chunk)
    add(chunk, now, kind, address, second);
}

/* ---- beginning and end --------------------------------------------------------- */

static uint64_t nanoseconds(clockid_t clock)
{
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void box_find_sites(box_site_fn *site)
{
  atomic_store_explicit(&site_here, site, memory_order_relaxed);
}

void box_find_nodes(box_node_fn *node)
{
  atomic_store_explicit(&node_here, node, memory_order_relaxed);
}

/* The memory is the parent's, and another thread of it may have held the lock or been changing the
 * lists. */
static void in_forked_child(void)
{
  atomic_store(&recorded, NULL);
  chunks_leave_to_parent();
}

static void watch_forks(void)
{
  (void)pthread_atfork(NULL, NULL, in_forked_child);
}

void box_begin(esper_core *core, size_t bytes)
{
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static const esper_recorder recorder = {allocated, freed, used, told};
  pthread_once(&once, watch_forks);
  chunks_limit(bytes);
  box_lock();
  if (!begin_ns) {
    begin_ticks = clock_ticks();
    begin_ns = nanoseconds(CLOCK_REALTIME);
    begin_monotonic = nanoseconds(CLOCK_MONOTONIC);
  }
  box_unlock();
  atomic_store(&recorded, core);
  esper_record(core, &recorder);
}

void box_end(void)
{
  esper_core *core = atomic_exchange(&recorded, NULL);
  if (core)
    esper_record(core, NULL);
}

bool box_is_on(void)
{
  return atomic_load(&recorded) != NULL;
}

box_stats_t box_stats(void)
{
  box_lock();
  box_stats_t stats = {box_is_on(), atomic_load(&lost),
                       chunks_count() * sizeof(chunk_t) + carried_bytes() + sites_bytes(),
                       chunks_used_again()};
  box_unlock();
  return stats;
}

bool box_is_valid(void)
{
  box_lock();
  bool valid = chunks_are_valid() && carried_is_valid() && lanes_are_valid() && sites_are_valid();
  box_unlock();
  return valid;
}

void box_reset(void)
{
  box_lock();
  chunks_forget();
  carried_forget();
  lanes_forget();
  atomic_store(&lost, 0);
  box_unlock();
}

/* ---- writing: only what a signal's handler may call, unless the core is asked ----- */

static void put_lanes(out_t *out)
{
  unsigned count = lanes_count();
  out_section(out, "LANE", count, count * sizeof(box_lane_item_t));
  for (unsigned lane = 0; lane < count; lane++) {
    box_lane_item_t item = lane_item(lane);
    out_put(out, &item, sizeof item);
  }
}

static void put_sites(out_t *out)
{
  unsigned count = sites_count();
  uint64_t bytes = 0;
  uint32_t length;
  for (unsigned site = 1; site < count; site++) {
    site_name(site, &length);
    bytes += sizeof length + length;
  }
  out_section(out, "SITE", count - 1, bytes);
  for (unsigned site = 1; site < count; site++) {
    const char *name = site_name(site, &length);
    out_put(out, &length, sizeof length);
    out_put(out, name, length);
  }
  out_padding(out, bytes);
}

static void put_live(out_t *out)
{
  box_live_item_t live;
  uint64_t count = 0, since = chunks_oldest_ticks();
  for (size_t i = 0; i < carried_places(); i++)
    count += carried_at(i, since, &live);
  out_section(out, "LIVE", count, count * sizeof live);
  for (size_t i = 0; i < carried_places(); i++)
    if (carried_at(i, since, &live))
      out_put(out, &live, sizeof live);
}

/* Each chunk is a section of its own, whose length is read once: threads go on adding to theirs.
 * None is used again meanwhile, since that takes the lock. */
static void put_chunks(out_t *out, const chunk_t *chunk)
{
  for (; chunk; chunk = chunk->next) {
    box_chunk_head_t head = {chunk->ticks, chunk->thread,
                             atomic_load_explicit(&chunk->words, memory_order_acquire)};
    out_section(out, "EVNT", 1, sizeof head + head.words * sizeof *chunk->word);
    out_put(out, &head, sizeof head);
    out_put(out, chunk->word, head.words * sizeof *chunk->word);
  }
}

static void put_snapshot(out_t *out, esper_core *core)
{
  esper_snapshot snapshot;
  if (esper_snapshot_take(core, -1, &snapshot) != ESPER_OK)
    return;
  size_t blocks = 0;
  out_section(out, "SEGM", snapshot.segment_count,
              snapshot.segment_count * sizeof(box_segment_item_t));
  for (size_t i = 0; i < snapshot.segment_count; i++) {
    const esper_segment_entry *s = &snapshot.segments[i];
    box_segment_item_t item = {s->address,
                               s->size,
                               s->device,
                               (s->mapped ? 1u : 0) | (s->large ? 2u : 0),
                               (uintptr_t)s->stream,
                               {s->pool[0], s->pool[1]}};
    out_put(out, &item, sizeof item);
  }
  for (size_t i = 0; i < snapshot.block_count; i++)
    blocks += snapshot.blocks[i].state != ESPER_BLOCK_INACTIVE;
  out_section(out, "BLCK", blocks, blocks * sizeof(box_block_item_t));
  for (size_t i = 0; i < snapshot.block_count; i++) {
    const esper_block_entry *b = &snapshot.blocks[i];
    box_block_item_t item = {b->address,
                             b->size,
                             b->requested,
                             (uintptr_t)b->stream,
                             b->state == ESPER_BLOCK_PENDING_FREE,
                             0};
    if (b->state != ESPER_BLOCK_INACTIVE)
      out_put(out, &item, sizeof item);
  }
  esper_snapshot_free(&snapshot);
}

box_header_t box_header(const char *why)
{
  box_header_t header = {.magic = BOX_MAGIC,
                         .version = BOX_VERSION,
                         .size = sizeof header,
                         .begin_ticks = begin_ticks,
                         .begin_ns = begin_ns,
                         .end_ticks = clock_ticks(),
                         .end_ns = begin_ns + nanoseconds(CLOCK_MONOTONIC) - begin_monotonic,
                         .complete_ticks =
                             carried_until() > begin_ticks ? carried_until() + 1 : begin_ticks,
                         .lost = atomic_load(&lost),
                         .pid = (uint64_t)getpid()};
  for (size_t i = 0; why[i] && i + 1 < sizeof header.why; i++)
    header.why[i] = why[i];
  return header;
}

int box_write(int file, const char *why, const char *info, bool urgent)
{
  out_t out = {file, 0, false};
  if (!urgent)
    box_lock();
  else if (!box_try_lock())
    return EAGAIN;
  box_header_t header = box_header(why);
  out_put(&out, &header, sizeof header);
  if (info) {
    out_section(&out, "INFO", 1, strlen(info));
    out_put(&out, info, strlen(info));
    out_padding(&out, strlen(info));
  }
  put_lanes(&out);
  put_sites(&out);
  put_live(&out);
  put_chunks(&out, chunks_queued());
  put_chunks(&out, chunks_open());
  box_unlock();
  esper_core *core = atomic_load(&recorded);
  if (core && !urgent)
    put_snapshot(&out, core);
  out_section(&out, "END ", 0, 0);
  return out.error;
}
