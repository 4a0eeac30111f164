#include "follow.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "carried.h"
#include "chunks.h"
#include "lanes.h"
#include "lock.h"
#include "out.h"
#include "recorder.h"
#include "sites.h"

enum { PLACES_AT_ONCE = 1024 };

/* A chunk that has something to tell. It is used again for other events once it has begun anew. */
typedef struct listed {
  const chunk_t *chunk;
  uint64_t ticks; /* at its beginning */
} listed_t;

typedef struct follower {
  out_t out;
  uint64_t since, end, oldest;
  union {
    uint64_t words[CHUNK_WORDS];
    box_lane_item_t lanes[MOST_LANES];
    box_live_item_t live[PLACES_AT_ONCE];
    char text[CHUNK_WORDS * sizeof(uint64_t)];
  } copy;
  size_t count, most;
  bool left_out;
  listed_t listed[];
} follower_t;

/* With the lock held. */
static void list_chunks(follower_t *f, const chunk_t *chunk)
{
  for (; chunk; chunk = chunk->next)
    if (chunk->until > f->since && chunk->ticks <= f->end) {
      if (f->count < f->most)
        f->listed[f->count++] = (listed_t){chunk, chunk->ticks};
      else /* opened since there was room for all */
        f->left_out = true;
    }
}

/* The first event at `at` or later that is after a time. *from: what its ticks are counted from. */
static unsigned first_after(const uint64_t *word, unsigned words, unsigned at, uint64_t time,
                            uint64_t *from)
{
  while (at < words) {
    unsigned kind = box_kind(word[at]);
    if (kind == BOX_TIME)
      *from = word[at] >> 4;
    else if (*from + box_ticks(word[at]) > time)
      break;
    at += (unsigned)box_words(kind);
  }
  return at;
}

static void put_chunk(follower_t *f, listed_t listed)
{
  unsigned words = 0;
  box_lock();
  uint32_t thread = listed.chunk->thread;
  if (listed.chunk->ticks == listed.ticks) {
    words = atomic_load_explicit(&listed.chunk->words, memory_order_acquire);
    memcpy(f->copy.words, listed.chunk->word, words * sizeof *f->copy.words);
  }
  box_unlock();
  uint64_t from = listed.ticks;
  unsigned first = first_after(f->copy.words, words, 0, f->since, &from);
  box_chunk_head_t head = {from, thread, 0};
  head.words = first_after(f->copy.words, words, first, f->end, &from) - first;
  uint64_t bytes = head.words * sizeof *f->copy.words;
  if (!head.words)
    return;
  out_section(&f->out, "EVNT", 1, sizeof head + bytes);
  out_put(&f->out, &head, sizeof head);
  out_put(&f->out, f->copy.words + first, bytes);
}

static void put_lanes(follower_t *f)
{
  box_lock();
  unsigned count = lanes_count();
  for (unsigned lane = 0; lane < count; lane++)
    f->copy.lanes[lane] = lane_item(lane);
  box_unlock();
  out_section(&f->out, "LANE", count, count * sizeof *f->copy.lanes);
  out_put(&f->out, f->copy.lanes, count * sizeof *f->copy.lanes);
}

/* As many names as the copy has room for. Returns the next number; 0: no more. */
static unsigned put_some_sites(follower_t *f, unsigned site)
{
  size_t bytes = 0;
  unsigned first = site;
  uint32_t length;
  box_lock();
  for (; site < sites_count(); site++, bytes += sizeof length + length) {
    const char *name = site_name(site, &length);
    if (sizeof length + length > sizeof f->copy - bytes)
      break;
    memcpy(f->copy.text + bytes, &length, sizeof length);
    memcpy(f->copy.text + bytes + sizeof length, name, length);
  }
  box_unlock();
  if (site == first)
    return 0;
  out_section(&f->out, "SITE", site - first, bytes);
  out_put(&f->out, f->copy.text, bytes);
  out_padding(&f->out, bytes);
  return site;
}

static void put_some_live(follower_t *f, size_t place)
{
  size_t count = 0, end = place + PLACES_AT_ONCE;
  box_lock();
  for (; place < end && place < carried_places(); place++)
    count += carried_at(place, f->oldest, &f->copy.live[count]);
  box_unlock();
  if (!count)
    return;
  out_section(&f->out, "LIVE", count, count * sizeof *f->copy.live);
  out_put(&f->out, f->copy.live, count * sizeof *f->copy.live);
}

static void follow(follower_t *f, unsigned first_site)
{
  box_lock();
  f->oldest = chunks_oldest_ticks();
  uint64_t moved = carried_moved();
  size_t places = f->since ? 0 : carried_places();
  list_chunks(f, chunks_queued());
  list_chunks(f, chunks_open());
  box_unlock();
  for (size_t i = 0; i < f->count; i++)
    put_chunk(f, f->listed[i]);
  put_lanes(f);
  for (unsigned site = first_site ? first_site : 1; site;)
    site = put_some_sites(f, site);
  /* At the end: what was overwritten meanwhile is among it. */
  for (size_t place = 0; place < places; place += PLACES_AT_ONCE)
    put_some_live(f, place);
  box_lock();
  bool late = f->since ? carried_until() > f->since : carried_moved() != moved;
  late |= f->left_out;
  box_unlock();
  if (late)
    out_section(&f->out, "LATE", 0, 0);
  out_section(&f->out, "END ", 0, 0);
}

int box_follow(int socket, uint64_t since, unsigned first_site)
{
  out_t out = {socket, 0, true};
  box_lock();
  box_header_t header = box_header("since");
  size_t chunks = chunks_count();
  box_unlock();
  if (since + 1 < header.complete_ticks || since > header.end_ticks) {
    since = 0;
    strcpy(header.why, "whole");
  }
  follower_t *f = malloc(sizeof *f + chunks * sizeof *f->listed);
  if (!f)
    return ENOMEM;
  *f = (follower_t){.out = out, .since = since, .end = header.end_ticks, .most = chunks};
  out_put(&f->out, &header, sizeof header);
  follow(f, first_site);
  int error = f->out.error;
  free(f);
  return error;
}
