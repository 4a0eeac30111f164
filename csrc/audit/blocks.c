/* blocks.c: allocations, accesses, marks and frees. */
#include "blocks.h"

#include <stdlib.h>

#include "captured.h"
#include "causes.h"
#include "findings.h"
#include "footprint.h"
#include "order.h"

/* Uses that a block keeps at most. An access to pieces of a block replaces no access to other
 * pieces; beyond this many the oldest is forgotten. */
enum { USES = 32 };
/* Hazards that a stream keeps at most of the same lines and the same user; beyond this many the
 * oldest is forgotten. */
enum { HAZARDS = 32 };
/* Kinds of views that a block keeps at most; beyond this many the oldest is forgotten. */
enum { VIEWS = 32 };

static audit_finding finding_of(const audit *a, const block *b, audit_kind kind)
{
  audit_finding f = {.kind = kind, .count = 1, .address = b->address, .size = b->size};
  f.cause = AUDIT_NO_CAUSE;
  f.allocated = b->allocated;
  f.home_is_known = b->home != AUDIT_NONE;
  if (f.home_is_known)
    f.home = a->streams[b->home]->name;
  return f;
}

static audit_point point_of(const audit *a, const use *u)
{
  return (audit_point){u->place, a->streams[u->stream]->name, u->writes, u->is_allocation};
}

/* Where the block's stream works on blocks like this. NULL: unknown, or its capture is over. */
static lane *home_of(audit *a, const block *b)
{
  if (b->home == AUDIT_NONE)
    return NULL;
  stream *s = a->streams[b->home];
  if (!b->capture)
    return order_outside(a, s);
  return s->capture && s->capture->id == b->capture ? &s->branch : NULL;
}

/* ---- uses ---------------------------------------------------------------- */

static void forget_use(block *b, size_t index)
{
  for (size_t i = index + 1; i < b->use_count; i++)
    b->uses[i - 1] = b->uses[i];
  b->use_count--;
}

static void drop_oldest_if_full(block *b, const use *next)
{
  size_t oldest = 0;
  if (b->use_count < USES)
    return;
  while (oldest < b->use_count && b->uses[oldest].slot != next->slot)
    oldest++;
  forget_use(b, oldest < b->use_count ? oldest : 0);
}

static void remember(audit *a, block *b, const lane *l, const use *next)
{
  for (size_t i = b->use_count; i-- > 0;) {
    const use *u = &b->uses[i];
    /* Who comes after `next` comes after this one. But two reads are not ordered, so a read does
     * not stand for a write before it. */
    if ((next->writes || !u->writes) && order_covers(l, u->slot, u->epoch) &&
        footprint_covers(&next->bytes, &u->bytes))
      forget_use(b, i);
  }
  drop_oldest_if_full(b, next);
  size_t before = b->use_capacity;
  if (!audit_reserve((void **)&b->uses, &b->use_capacity, b->use_count, sizeof *next)) {
    a->lost = 1;
    return;
  }
  a->bytes += (b->use_capacity - before) * sizeof *next;
  b->uses[b->use_count++] = *next;
}

/* ---- accesses ------------------------------------------------------------ */

/* How much a finding about the use says: an allocation says little, and so does a use that a known
 * cause explains. */
static int weight(const audit *a, const lane *l, const use *u)
{
  return !u->is_allocation + 2 * (cause_of(a, l, u->slot, u->epoch) == AUDIT_NO_CAUSE);
}

/* An access makes at most one finding. If it is not ordered after several uses, the finding names
 * the one that says most, of equal ones the last. */
static void judge_order(audit *a, block *b, const lane *l, const use *next)
{
  const uint64_t bit = 1ull << (next->slot & 63);
  const use *worst = NULL;
  for (size_t i = b->use_count; i-- > 0;) {
    use *u = &b->uses[i];
    if ((!next->writes && !u->writes) || order_covers(l, u->slot, u->epoch) ||
        !footprint_overlaps(&u->bytes, &next->bytes))
      continue;
    if (!(u->reported & bit) && (!worst || weight(a, l, u) > weight(a, l, worst)))
      worst = u;
    u->reported |= bit;
  }
  if (!worst)
    return;
  audit_finding f = finding_of(a, b, next->writes ? AUDIT_WRITE_EARLY : AUDIT_READ_EARLY);
  f.earlier = point_of(a, worst);
  f.later = point_of(a, next);
  f.has_later = 1;
  cause_add(a, &f, l, worst->slot, worst->epoch);
}

/* Memory of the home stream that was freed before this block was allocated may be this memory. */
static void judge_hazards(audit *a, const block *b, const lane *l, const use *next)
{
  lane *home = home_of(a, b);
  for (hazard **at = home ? &home->hazards : NULL; at && *at;) {
    hazard *h = *at;
    if (h->freed_at > b->serial || order_covers(l, h->slot, h->epoch)) {
      at = &h->next;
      continue;
    }
    h->finding.later = point_of(a, next);
    h->finding.has_later = 1;
    cause_add(a, &h->finding, l, h->slot, h->epoch);
    *at = h->next;
    a->bytes -= sizeof *h;
    free(h);
  }
}

void watched_touch(audit *a, block *b, stream *s, const audit_access *access)
{
  lane *l = order_lane(a, s);
  const use next = {.slot = l->slot,
                    .stream = s->number,
                    .epoch = l->now,
                    .bytes = access->bytes,
                    .place = access->place,
                    .writes = access->writes != 0};
  judge_order(a, b, l, &next);
  judge_hazards(a, b, l, &next);
  remember(a, b, l, &next);
}

static handed_out *view_like(const block *b, uint64_t like)
{
  for (size_t i = 0; i < b->view_count; i++)
    if (b->views[i].like == like)
      return &b->views[i];
  return NULL;
}

void audit_handed_out(audit *a, uintptr_t address, uint64_t like)
{
  block *b = table_get(&a->blocks, address);
  const graph *g = b ? graph_of(a, b) : NULL;
  if (!g || g->generation == 0)
    return;
  const handed_out view = {like, g->generation};
  handed_out *known = view_like(b, like);
  if (known) {
    *known = view;
    return;
  }
  size_t before = b->view_capacity;
  if (b->view_count == VIEWS)
    memmove(b->views, b->views + 1, --b->view_count * sizeof view);
  if (!audit_reserve((void **)&b->views, &b->view_capacity, b->view_count, sizeof view)) {
    a->lost = 1;
    return;
  }
  a->bytes += (b->view_capacity - before) * sizeof view;
  b->views[b->view_count++] = view;
}

/* A view shows the output that it was handed out for until one like it is handed out for a later
 * replay. A view that is handed out once is meant to show the newest. */
static void judge_output(audit *a, const block *b, const stream *s, const audit_access *access)
{
  const graph *g = graph_of(a, b);
  const handed_out *newest = access->born ? view_like(b, access->like) : NULL;
  if (!g || !newest || access->born >= newest->generation)
    return;
  audit_finding f = finding_of(a, b, AUDIT_STALE_OUTPUT);
  f.earlier = g->last;
  f.later = (audit_point){access->place, s->name, access->writes, 0};
  f.has_later = 1;
  finding_add(a, &f);
}

static void know_size(block *b, size_t size)
{
  if (b->size || !size)
    return;
  b->size = size;
  for (size_t i = 0; i < b->use_count; i++)
    if (b->uses[i].is_allocation)
      b->uses[i].bytes.size = size;
}

static block *block_make(audit *a, uintptr_t address, size_t size, uint32_t site)
{
  block *b = audit_new(sizeof *b);
  if (!b || !table_put(&a->blocks, address, b)) {
    a->lost = 1;
    free(b);
    return NULL;
  }
  a->bytes += sizeof *b;
  b->address = address;
  b->size = size;
  b->serial = ++a->steps;
  b->home = AUDIT_NONE;
  b->allocated = site;
  return b;
}

void audit_accessed(audit *a, const audit_access *access)
{
  stream *s = order_stream(a, access->stream);
  block *b = table_get(&a->blocks, access->address);
  if (!b)
    b = block_make(a, access->address, access->size, 0);
  if (!s || !b)
    return;
  know_size(b, access->size);
  if (s->capture && b->capture != s->capture->id) {
    graph_capture_access(a, s->capture, b, access);
    return;
  }
  judge_output(a, b, s, access);
  watched_touch(a, b, s, access);
}

/* ---- hazards ------------------------------------------------------------- */

/* Drops hazards that the lane is ordered after by now, and says of others whether missing waits
 * explain them. */
static void prune_hazards(audit *a, lane *l)
{
  for (hazard **at = &l->hazards; *at;) {
    hazard *h = *at;
    if (!order_covers(l, h->slot, h->epoch)) {
      if (h->finding.cause == AUDIT_NO_CAUSE)
        h->finding.cause = cause_of(a, l, h->slot, h->epoch);
      at = &h->next;
      continue;
    }
    if (!table_put(&a->ordered_keys, finding_key(&h->finding), a))
      a->lost = 1;
    *at = h->next;
    a->bytes -= sizeof *h;
    free(h);
  }
}

/* ---- allocations --------------------------------------------------------- */

void audit_allocated(audit *a, uintptr_t address, size_t size, const audit_stream *where,
                     uint32_t site)
{
  block *b = table_remove(&a->blocks, address);
  if (b)
    watched_destroy(a, b); /* its free was not seen */
  stream *s = where ? order_stream(a, *where) : NULL;
  b = block_make(a, address, size, site);
  if (!s || !b)
    return;
  lane *l = order_lane(a, s);
  prune_hazards(a, l);
  b->home = s->number;
  l->allocated_at = b->serial;
  if (s->capture) {
    b->capture = s->capture->id;
    graph_own(a, s->capture, b);
  }
  /* Of unknown size: no block reaches further than all addresses. */
  const use allocation = {.slot = l->slot,
                          .stream = s->number,
                          .epoch = l->now,
                          .bytes = {address, size ? size : UINTPTR_MAX - address, 0, 0},
                          .place = {site, 0, 0},
                          .writes = 1,
                          .is_allocation = 1};
  remember(a, b, l, &allocation);
}

/* ---- marks --------------------------------------------------------------- */

static void add_mark(audit *a, block *b, const mark *m)
{
  for (size_t i = 0; i < b->mark_count; i++)
    if (b->marks[i].slot == m->slot) {
      b->marks[i].site = m->site;
      b->marks[i].until_free |= m->until_free;
      return;
    }
  size_t before = b->mark_capacity;
  if (!audit_reserve((void **)&b->marks, &b->mark_capacity, b->mark_count, sizeof *m)) {
    a->lost = 1;
    return;
  }
  a->bytes += (b->mark_capacity - before) * sizeof *m;
  b->marks[b->mark_count++] = *m;
}

void audit_marked(audit *a, uintptr_t address, audit_stream where, int until_free, uint32_t site)
{
  block *b = table_get(&a->blocks, address);
  stream *s = b ? order_stream(a, where) : NULL;
  if (!s)
    return;
  const lane *l = order_lane(a, s);
  const mark m = {l->slot, s->number, site, until_free};
  add_mark(a, b, &m);
  for (size_t i = 0; i < b->use_count; i++)
    if (order_covers(l, b->uses[i].slot, b->uses[i].epoch))
      b->uses[i].is_protected = 1;
}

void audit_marked_by_event(audit *a, uintptr_t address, uint64_t name, uint32_t site)
{
  block *b = table_get(&a->blocks, address);
  const event *e = table_get(&a->events, name);
  if (!b || !e)
    return;
  for (size_t i = 0; i < b->use_count; i++) {
    use *u = &b->uses[i];
    if (u->slot == e->slot) {
      const mark m = {u->slot, u->stream, site, 0};
      add_mark(a, b, &m);
    }
    if ((u->slot == e->slot && u->epoch <= e->epoch) ||
        (e->after && clock_get(&e->after->clock, u->slot) >= u->epoch))
      u->is_protected = 1;
  }
}

void audit_held(audit *a, uintptr_t address)
{
  block *b = table_get(&a->blocks, address);
  if (b)
    b->is_held = 1;
}

/* ---- frees --------------------------------------------------------------- */

static int is_marked_until_free(audit *a, const block *b, const use *u)
{
  for (size_t i = 0; i < b->mark_count; i++) {
    const lane *l = b->marks[i].until_free
                        ? order_lane_with(a, a->streams[b->marks[i].stream], b->marks[i].slot)
                        : NULL;
    if (l && order_covers(l, u->slot, u->epoch))
      return 1;
  }
  return 0;
}

static const mark *mark_on(const block *b, uint32_t slot)
{
  for (size_t i = 0; i < b->mark_count; i++)
    if (b->marks[i].slot == slot)
      return &b->marks[i];
  return NULL;
}

/* The hazard that the free is a part of. NULL: it is a new one, for which there is room now. Work
 * of another stream is another danger: the home stream may wait for one of them only. */
static hazard *find_hazard(audit *a, lane *home, const use *u, uint64_t key)
{
  size_t count = 0;
  for (hazard **at = &home->hazards, *h; (h = *at); at = &h->next) {
    if (h->slot != u->slot || finding_key(&h->finding) != key)
      continue;
    if (h->freed_at > home->allocated_at)
      return h;
    if (++count < HAZARDS)
      continue;
    *at = h->next; /* the oldest is forgotten: they are in the order of their frees */
    a->bytes -= sizeof *h;
    free(h);
    break;
  }
  return NULL;
}

static void add_hazard(audit *a, lane *home, const block *b, const use *u, uint32_t site)
{
  const mark *m = mark_on(b, u->slot);
  audit_finding f = finding_of(a, b, m ? AUDIT_MARKED_EARLY : AUDIT_FREED_IN_USE);
  f.earlier = point_of(a, u);
  f.freed = site;
  f.marked = m ? m->site : 0;
  if (a->last_free_at != a->steps)
    a->last_free = f; /* the latest use comes first */
  a->last_free_at = a->steps;
  hazard *h = find_hazard(a, home, u, finding_key(&f));
  if (h) {
    f.count += h->finding.count;
    h->finding = f;
    if (h->epoch < u->epoch)
      h->epoch = u->epoch;
    return;
  }
  h = audit_new(sizeof *h);
  if (!h) {
    a->lost = 1;
    return;
  }
  a->bytes += sizeof *h;
  *h = (hazard){home->hazards, u->slot, u->epoch, a->steps, f};
  home->hazards = h;
}

/* Uses that the home stream does not come after and that nothing protects. One that another such
 * use comes after is not named besides: ordering or marking the latter helps both. */
static void judge_free(audit *a, const block *b, lane *home, uint32_t site)
{
  const use *named[USES];
  size_t count = 0;
  for (size_t i = b->use_count; i-- > 0;) {
    const use *u = &b->uses[i];
    int skip =
        u->is_protected || order_covers(home, u->slot, u->epoch) || is_marked_until_free(a, b, u);
    for (size_t k = 0; k < count && !skip; k++) {
      const lane *l = order_lane_with(a, a->streams[named[k]->stream], named[k]->slot);
      skip = l && order_covers(l, u->slot, u->epoch);
    }
    if (skip)
      continue;
    named[count++] = u;
    add_hazard(a, home, b, u, site);
  }
}

void audit_freed(audit *a, uintptr_t address, uint32_t site)
{
  block *b = table_remove(&a->blocks, address);
  a->steps++; /* for unknown memory, too: audit_last_free must not tell of an earlier free then */
  if (!b)
    return;
  lane *home = b->is_held ? NULL : home_of(a, b);
  if (home)
    judge_free(a, b, home, site);
  watched_destroy(a, b);
}

const audit_finding *audit_last_free(const audit *a)
{
  return a->last_free_at == a->steps && a->steps ? &a->last_free : NULL;
}

void watched_disown(audit *a, block *b)
{
  a->bytes -= b->use_capacity * sizeof *b->uses + b->mark_capacity * sizeof *b->marks;
  free(b->uses);
  free(b->marks);
  b->uses = NULL;
  b->marks = NULL;
  b->use_count = b->use_capacity = b->mark_count = b->mark_capacity = 0;
  b->home = AUDIT_NONE;
}

void watched_destroy(audit *a, block *b)
{
  watched_disown(a, b);
  a->bytes -= sizeof *b + b->view_capacity * sizeof *b->views;
  free(b->views);
  free(b);
}

/* Whether the stream was ordered in time for other hazards like this one. Then the program has
 * merely ended before the stream was ordered for the last of them. */
static int is_usually_ordered(const audit *a, const hazard *h)
{
  return table_get(&a->ordered_keys, finding_key(&h->finding)) != NULL;
}

void audit_judge_rest(audit *a)
{
  for (size_t i = 0; i < a->stream_count; i++) {
    lane *l = order_outside(a, a->streams[i]);
    prune_hazards(a, l);
    for (const hazard *h = l->hazards; h; h = h->next)
      if (!is_usually_ordered(a, h))
        cause_add(a, &h->finding, l, h->slot, h->epoch);
    order_drop_hazards(a, l);
  }
}
