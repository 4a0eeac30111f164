#include "read.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static const char no_memory[] = "there is not enough host memory for its events";
static const char is_damaged[] = "it is damaged: a part of it has impossible values";
static const char is_cut[] = "it is cut off: its end is missing";

/* As events are collected: those of one thread in their order. */
typedef struct event {
  uint64_t ticks, first, second;
  uint32_t thread;
} event_t;

typedef struct collected {
  event_t *at;
  size_t count, capacity;
} collected_t;

static bool collect(collected_t *c, event_t event)
{
  if (c->count == c->capacity) {
    size_t wider = c->capacity ? 2 * c->capacity : 4096;
    event_t *moved = realloc(c->at, wider * sizeof *moved);
    if (!moved)
      return false;
    c->at = moved;
    c->capacity = wider;
  }
  c->at[c->count++] = event;
  return true;
}

/* ---- sections ----------------------------------------------------------------- */

static const char *read_chunk(const char *data, uint64_t bytes, uint64_t end, collected_t *c)
{
  box_chunk_head_t head;
  if (bytes < sizeof head)
    return is_damaged;
  memcpy(&head, data, sizeof head);
  if (head.words != (bytes - sizeof head) / sizeof(uint64_t) || bytes % sizeof(uint64_t))
    return is_damaged;
  const uint64_t *word = (const uint64_t *)(const void *)(data + sizeof head);
  uint64_t from = head.ticks;
  for (uint32_t at = 0; at < head.words;) {
    unsigned kind = box_kind(word[at]), words = (unsigned)box_words(kind);
    if (kind == BOX_NONE || kind >= BOX_KINDS || words > head.words - at)
      return is_damaged;
    event_t event = {from + box_ticks(word[at]), word[at], words == 2 ? word[at + 1] : 0,
                     head.thread};
    if (kind == BOX_TIME)
      from = word[at] >> 4;
    else if (event.ticks <= end && !collect(c, event)) /* later ones are not of all threads */
      return no_memory;
    at += words;
  }
  return NULL;
}

static const char *read_live(const char *data, uint64_t count, collected_t *c)
{
  const box_live_item_t *live = (const box_live_item_t *)(const void *)data;
  for (uint64_t i = 0; i < count; i++) {
    if (live[i].address >> (ADDRESS_BITS + ADDRESS_SHIFT) || live[i].lane >= MOST_LANES ||
        live[i].site >= MOST_SITES)
      return is_damaged;
    event_t event = {live[i].ticks, box_first(BOX_FREE, 0, live[i].address), 0, 0};
    if (!collect(c, event)) /* nothing else was live there: a chunk may still say so */
      return no_memory;
    event.first = box_first(BOX_ALLOC, 0, live[i].address);
    event.second = box_second(live[i].size, live[i].lane, live[i].site);
    if (live[i].size && !collect(c, event))
      return no_memory;
  }
  return NULL;
}

static const char *check_sites(const char *data, uint64_t count, uint64_t bytes)
{
  for (uint64_t i = 0; i < count; i++) {
    uint32_t length;
    if (bytes < sizeof length)
      return is_damaged;
    memcpy(&length, data, sizeof length);
    data += sizeof length;
    bytes -= sizeof length;
    if (length > bytes)
      return is_damaged;
    data += length;
    bytes -= length;
  }
  return bytes ? is_damaged : NULL;
}

static bool segments_are_possible(const box_file_t *file)
{
  const uint64_t most = UINT64_C(1) << (ADDRESS_BITS + ADDRESS_SHIFT);
  bool possible = true;
  for (size_t i = 0; i < file->segment_count; i++)
    possible &= file->segments[i].address < most && file->segments[i].size < most;
  for (size_t i = 0; i < file->block_count; i++)
    possible &= file->blocks[i].address < most && file->blocks[i].size < most &&
                file->blocks[i].requested < most;
  for (size_t i = 0; i < file->lane_count; i++)
    possible &= file->lanes[i].before > -(int64_t)most && file->lanes[i].before < (int64_t)most;
  return possible;
}

static bool is_named(const box_section_t *section, const char *name)
{
  return memcmp(section->name, name, sizeof section->name) == 0;
}

static const char *read_section(const box_section_t *section, const char *data, box_file_t *file,
                                collected_t *c)
{
  static const struct {
    const char *name;
    size_t size; /* of an item */
  } tables[] = {{"LANE", sizeof(box_lane_item_t)},
                {"LIVE", sizeof(box_live_item_t)},
                {"SEGM", sizeof(box_segment_item_t)},
                {"BLCK", sizeof(box_block_item_t)}};
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
    if (is_named(section, tables[i].name) && section->bytes != section->count * tables[i].size)
      return is_damaged;
  const void *items = data;
  if (is_named(section, "LANE")) {
    file->lanes = items;
    file->lane_count = section->count;
  } else if (is_named(section, "SEGM")) {
    file->segments = items;
    file->segment_count = section->count;
  } else if (is_named(section, "BLCK")) {
    file->blocks = items;
    file->block_count = section->count;
  } else if (is_named(section, "SITE")) {
    file->sites = data;
    file->site_count = section->count;
    file->site_bytes = section->bytes;
    return check_sites(data, section->count, section->bytes);
  } else if (is_named(section, "INFO")) {
    file->info = data;
    file->info_bytes = section->bytes;
  } else if (is_named(section, "LIVE")) {
    return read_live(data, section->count, c);
  } else if (is_named(section, "EVNT")) {
    return read_chunk(data, section->bytes, file->header.end_ticks, c);
  }
  return NULL;
}

/* Sections are padded to 8 bytes. */
static const char *read_sections(const char *data, size_t bytes, box_file_t *file, collected_t *c)
{
  for (;;) {
    box_section_t section;
    if (bytes < sizeof section)
      return is_cut;
    memcpy(&section, data, sizeof section);
    data += sizeof section;
    bytes -= sizeof section;
    if (is_named(&section, "END "))
      return (c->count && !file->lane_count) || !segments_are_possible(file) ? is_damaged : NULL;
    uint64_t padded = section.bytes + (-section.bytes & 7);
    if (padded < section.bytes || padded > bytes)
      return is_cut;
    const char *wrong = read_section(&section, data, file, c);
    if (wrong)
      return wrong;
    data += padded;
    bytes -= padded;
  }
}

/* ---- by time ------------------------------------------------------------------ */

static bool is_sorted(const collected_t *c)
{
  for (size_t i = 1; i < c->count; i++)
    if (c->at[i].ticks < c->at[i - 1].ticks)
      return false;
  return true;
}

/* Sorts by the ticks, 16 bits at a time. Events of one thread, which are collected in their order,
 * keep it. */
static bool sort(collected_t *c)
{
  enum { DIGIT = 16 };
  if (is_sorted(c))
    return true;
  event_t *other = malloc(c->count * sizeof *other);
  size_t *begin = malloc(((size_t)1 << DIGIT) * sizeof *begin);
  bool possible = other && begin;
  for (unsigned shift = 0; possible && shift < 64; shift += DIGIT) {
    uint64_t differ = 0;
    memset(begin, 0, ((size_t)1 << DIGIT) * sizeof *begin);
    for (size_t i = 0; i < c->count; i++) {
      differ |= c->at[i].ticks ^ c->at[0].ticks;
      begin[c->at[i].ticks >> shift & ((1u << DIGIT) - 1)]++;
    }
    if (!(differ >> shift & ((1u << DIGIT) - 1)))
      continue;
    for (size_t digit = 0, sum = 0; digit < (size_t)1 << DIGIT; digit++) {
      size_t here = begin[digit];
      begin[digit] = sum;
      sum += here;
    }
    for (size_t i = 0; i < c->count; i++)
      other[begin[c->at[i].ticks >> shift & ((1u << DIGIT) - 1)]++] = c->at[i];
    event_t *swapped = c->at;
    c->at = other;
    other = swapped;
  }
  free(other);
  free(begin);
  return possible;
}

/* ---- which free belongs to which allocation ---------------------------------------- */

typedef struct place {
  uint64_t key;  /* address / 512 + 1; 0: empty */
  int64_t alloc; /* index of the live allocation; -1: none */
  int64_t last;  /* and of the last one, live or not */
} place_t;

typedef struct places {
  place_t *at;
  size_t capacity, used;
  uint64_t factor; /* random, so that no file can be made for it */
} places_t;

static place_t *place_of(const places_t *p, uint64_t key)
{
  uint64_t hash = key * p->factor;
  size_t at = (size_t)(hash ^ hash >> 32) & (p->capacity - 1);
  while (p->at[at].key && p->at[at].key != key)
    at = (at + 1) & (p->capacity - 1);
  return &p->at[at];
}

static bool widen(places_t *p)
{
  places_t wider = {.capacity = p->capacity ? 2 * p->capacity : 4096,
                    .used = p->used,
                    .factor = p->factor};
  wider.at = calloc(wider.capacity, sizeof *wider.at);
  if (!wider.at)
    return false;
  for (size_t i = 0; i < p->capacity; i++)
    if (p->at[i].key)
      *place_of(&wider, p->at[i].key) = p->at[i];
  free(p->at);
  *p = wider;
  return true;
}

/* NULL: no host memory. */
static place_t *place_at(places_t *p, uint64_t address)
{
  if (p->used >= p->capacity / 2 && !widen(p))
    return NULL;
  uint64_t key = (address >> ADDRESS_SHIFT) + 1;
  place_t *place = place_of(p, key);
  if (!place->key) {
    *place = (place_t){key, -1, -1};
    p->used++;
  }
  return place;
}

static void drop(event_t *event)
{
  event->first &= ~UINT64_C(15); /* BOX_NONE */
}

static uint64_t some_odd_number(void)
{
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number)
    number = UINT64_C(0x9e3779b97f4a7c15);
  return number | 1;
}

static bool has_address(unsigned kind)
{
  return kind == BOX_ALLOC || kind == BOX_FREE || kind == BOX_PENDING || kind == BOX_AVAILABLE ||
         kind == BOX_USE;
}

/* Pairs allocations and frees, and the other events with the allocation. Drops a free of
 * nothing, and an allocation whose free is missing, because it was in a chunk that is gone,
 * though the address was allocated again. */
static bool pair(collected_t *c, int64_t *partner)
{
  places_t places = {.factor = some_odd_number()};
  bool possible = true;
  for (size_t i = 0; i < c->count && possible; i++) {
    event_t *event = &c->at[i];
    unsigned kind = box_kind(event->first);
    partner[i] = -1;
    if (!has_address(kind))
      continue;
    place_t *place = place_at(&places, box_address(event->first));
    if (!place) {
      possible = false;
    } else if (kind == BOX_ALLOC) {
      if (place->alloc >= 0)
        drop(&c->at[place->alloc]);
      place->alloc = place->last = (int64_t)i;
    } else if (kind != BOX_FREE) {
      partner[i] = place->last;
    } else if (place->alloc < 0) {
      drop(event);
    } else {
      partner[i] = place->alloc;
      partner[place->alloc] = (int64_t)i;
      place->alloc = -1;
    }
  }
  free(places.at);
  return possible;
}

/* ---- the result ----------------------------------------------------------------- */

static bool make_columns(box_events_t *e, size_t count)
{
  size_t some = count ? count : 1;
  *e = (box_events_t){
      .count = count,
      .ns = malloc(some * sizeof *e->ns),
      .address = malloc(some * sizeof *e->address),
      .size = malloc(some * sizeof *e->size),
      .partner = malloc(some * sizeof *e->partner),
      .site = malloc(some * sizeof *e->site),
      .thread = malloc(some * sizeof *e->thread),
      .lane = malloc(some * sizeof *e->lane),
      .kind = malloc(some * sizeof *e->kind),
  };
  return e->ns && e->address && e->size && e->partner && e->site && e->thread && e->lane && e->kind;
}

/* Ticks to nanoseconds: by the two readings of both clocks. */
static int64_t ns_of(const box_header_t *h, uint64_t ticks)
{
  const double most = 4e18;
  double span = (double)(h->end_ticks - h->begin_ticks);
  double rate = span > 0 ? (double)(h->end_ns - h->begin_ns) / span : 1;
  double since = (double)(int64_t)(ticks - h->begin_ticks) * rate;
  int64_t ns = (int64_t)(since > most ? most : since < -most ? -most : since);
  return __builtin_add_overflow((int64_t)h->begin_ns, ns, &ns) ? INT64_MAX : ns;
}

/* Leaves out what was dropped. */
static bool compact(collected_t *c, int64_t *partner)
{
  int64_t *moved = malloc((c->count + 1) * sizeof *moved);
  size_t kept = 0;
  if (!moved)
    return false;
  for (size_t i = 0; i < c->count; i++)
    moved[i] = box_kind(c->at[i].first) == BOX_NONE ? -1 : (int64_t)kept++;
  for (size_t i = 0; i < c->count; i++)
    if (moved[i] >= 0) {
      c->at[moved[i]] = c->at[i];
      partner[moved[i]] = partner[i] < 0 ? -1 : moved[partner[i]];
    }
  c->count = kept;
  free(moved);
  return true;
}

static void fill(const box_file_t *file, const collected_t *c, box_events_t *e)
{
  e->count = c->count;
  for (size_t i = 0; i < c->count; i++) {
    const event_t *from = &c->at[i];
    e->kind[i] = (uint8_t)box_kind(from->first);
    e->ns[i] = ns_of(&file->header, from->ticks);
    e->address[i] = box_address(from->first);
    e->size[i] = box_size(from->second);
    e->lane[i] = (uint16_t)(box_lane(from->second) < file->lane_count ? box_lane(from->second) : 0);
    e->site[i] = box_site(from->second) <= file->site_count ? box_site(from->second) : 0;
    e->thread[i] = from->thread;
  }
  for (size_t i = 0; i < c->count; i++)
    if (e->partner[i] >= 0 && e->kind[i] != BOX_ALLOC) {
      e->size[i] = e->size[e->partner[i]];
      if (e->kind[i] != BOX_USE) { /* which has a stream and a place of its own */
        e->lane[i] = e->lane[e->partner[i]];
        e->site[i] = e->site[e->partner[i]];
      }
    }
}

static const char *check_header(const void *data, size_t bytes, box_header_t *header)
{
  if (bytes < sizeof *header) {
    uint64_t magic = 0;
    memcpy(&magic, data, bytes < sizeof magic ? bytes : sizeof magic);
    return magic == BOX_MAGIC ? is_cut : "it is no recording of esper_alloc";
  }
  memcpy(header, data, sizeof *header);
  if (header->magic != BOX_MAGIC)
    return "it is no recording of esper_alloc";
  if (header->version != BOX_VERSION)
    return "it was written by another version of esper_alloc, which has another format: read it "
           "with "
           "that version";
  if (header->size != sizeof *header || header->end_ticks < header->begin_ticks ||
      header->end_ns > INT64_MAX || header->begin_ns > header->end_ns ||
      header->why[sizeof header->why - 1])
    return is_damaged;
  return NULL;
}

const char *box_read(const void *data, size_t bytes, box_file_t *file)
{
  *file = (box_file_t){0};
  collected_t c = {0};
  const char *wrong = check_header(data, bytes, &file->header);
  if (!wrong)
    wrong = read_sections((const char *)data + sizeof file->header, bytes - sizeof file->header,
                          file, &c);
  if (!wrong && (!make_columns(&file->events, c.count) || !sort(&c) ||
                 !pair(&c, file->events.partner) || !compact(&c, file->events.partner)))
    wrong = no_memory;
  file->complete_ns = ns_of(&file->header, file->header.complete_ticks);
  if (!wrong)
    fill(file, &c, &file->events);
  else
    box_forget(file);
  free(c.at);
  return wrong;
}

void box_forget(box_file_t *file)
{
  box_events_t *e = &file->events;
  void *columns[] = {e->ns, e->address, e->size, e->partner, e->site, e->thread, e->lane, e->kind};
  for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
    free(columns[i]);
  *e = (box_events_t){0};
}
