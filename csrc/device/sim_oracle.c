/* sim_oracle.c: who may touch which bytes.
 *
 * Physical memory is cut into stretches. A stretch has a set of marks: the
 * accesses that somebody may not be ordered after yet. An access replaces the
 * marks that it is itself ordered after, since whoever comes after it comes
 * after those too; so sets stay small. Sets are shared and counted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

enum { GRANULE = 512 };

enum { REPLAYED = SIM_NONE - 1 };

typedef struct sim_mark {
  uint32_t slot;  /* SIM_NONE: a node of a capture */
  uint32_t node;  /* the node; REPLAYED: the operation is a graph's replay */
  uint64_t index; /* operation of the slot, or id of the capture */
  uint64_t owner;
  uintptr_t mapping; /* where the memory begins at which it was accessed */
} sim_mark;

struct sim_marks {
  uint32_t references, count, order; /* room for 1 << order */
  sim_marks *next_free;
  sim_mark at[];
};

/* ---- clocks ------------------------------------------------------------ */

uint64_t sim_clock_get(const sim_clock *clock, uint32_t slot)
{
  return slot < clock->count ? clock->at[slot] : 0;
}

static void clock_reach(sim *s, sim_clock *clock, uint32_t count)
{
  if (count <= clock->count)
    return;
  if (count > clock->capacity) {
    uint32_t capacity = s->stream_count + 8;
    if (capacity < count)
      capacity = count;
    clock->at = realloc(clock->at, capacity * sizeof *clock->at);
    if (!clock->at)
      abort();
    clock->capacity = capacity;
  }
  memset(clock->at + clock->count, 0, (count - clock->count) * sizeof *clock->at);
  clock->count = count;
}

void sim_clock_set(sim *s, sim_clock *clock, uint32_t slot, uint64_t index)
{
  clock_reach(s, clock, slot + 1);
  clock->at[slot] = index;
}

void sim_clock_join(sim *s, sim_clock *clock, const sim_clock *other)
{
  clock_reach(s, clock, other->count);
  for (uint32_t i = 0; i < other->count; i++)
    if (clock->at[i] < other->at[i])
      clock->at[i] = other->at[i];
}

void sim_clock_copy(sim *s, sim_clock *clock, const sim_clock *other)
{
  clock->count = 0;
  sim_clock_join(s, clock, other);
}

void sim_host_learn(sim *s, const sim_clock *clock)
{
  sim_clock_join(s, &s->host, clock);
  s->host_version++;
}

/* ---- marks ------------------------------------------------------------- */

static sim_marks *marks_new(sim *s, uint32_t count)
{
  uint32_t order = 0;
  while (((uint32_t)1 << order) < count)
    order++;
  int kept = order < sizeof s->free_marks / sizeof *s->free_marks;
  sim_marks *marks = kept ? s->free_marks[order] : NULL;
  if (marks)
    s->free_marks[order] = marks->next_free;
  else
    marks = malloc(sizeof *marks + ((size_t)1 << order) * sizeof(sim_mark));
  if (!marks)
    abort();
  marks->references = 1;
  marks->count = 0;
  marks->order = order;
  return marks;
}

static void marks_drop(sim *s, sim_marks *marks)
{
  if (!marks || --marks->references)
    return;
  if (marks->order < sizeof s->free_marks / sizeof *s->free_marks) {
    marks->next_free = s->free_marks[marks->order];
    s->free_marks[marks->order] = marks;
  } else {
    free(marks);
  }
}

static sim_owner *owner_slot(const sim *s, uint64_t id)
{
  return &s->owners[id % SIM_OWNERS];
}

/* The mark can no longer matter to anybody: the host knows that it is over, or
 * it was a node of a capture that ended, whose replays are launches. */
static int mark_is_over(sim *s, const sim_mark *mark)
{
  if (mark->slot == SIM_NONE)
    return !sim_capture_lasts(s, mark->index);
  if (sim_clock_get(&s->host, mark->slot) >= mark->index)
    return 1;
  return s->options.oracle == SIM_ORACLE_EXECUTED &&
         s->streams[mark->slot]->executed >= mark->index;
}

/* What the stream does next comes after the mark. */
static int mark_is_before(sim *s, const sim_mark *mark, const sim_stream *stream)
{
  if (mark_is_over(s, mark))
    return 1;
  const sim_graph *capture = sim_capture_of(stream);
  if (mark->slot == SIM_NONE)
    return capture && sim_capture_is_after(s, stream, mark->index, mark->node);
  /* Replays within a group come in the order of their captures. That one of these
   * was invalidated meanwhile does not take its memory out of the group. */
  const sim_owner *owner = owner_slot(s, mark->owner);
  uint64_t group = stream->capture ? stream->capture->group : 0;
  if (group && mark->node == REPLAYED && owner->id == mark->owner && owner->group == group)
    return 1;
  /* Work in a capture runs at some launch: nothing outside orders it. */
  return !capture && sim_clock_get(&stream->clock, mark->slot) >= mark->index;
}

static void report_stream(sim *s, const sim_stream *stream)
{
  sim_report(s, "stream %llu (device %d, handle %p%s)", (unsigned long long)stream->id,
             stream->device, sim_stream_handle(stream), stream->alive ? "" : ", destroyed");
}

static void report_owner(sim *s, uint64_t id)
{
  const sim_owner *owner = owner_slot(s, id);
  if (id == 0 || owner->id != id) {
    sim_report(s, "owner #%llu", (unsigned long long)id);
    return;
  }
  sim_report(s, "owner #%llu ([0x%zx, +%zu) of stream %llu, device %d%s)", (unsigned long long)id,
             (size_t)owner->address, owner->size, (unsigned long long)owner->stream, owner->device,
             owner->capture ? ", in a capture" : "");
}

static void report_mark(sim *s, const sim_mark *mark, const sim_stream *stream)
{
  sim_report(s, "  by ");
  report_owner(s, mark->owner);
  if (mark->slot == SIM_NONE) {
    sim_report(s, ", node %u of capture %llu\n", mark->node, (unsigned long long)mark->index);
    return;
  }
  const sim_stream *by = s->streams[mark->slot];
  sim_report(s, ",\n  operation %llu of ", (unsigned long long)mark->index);
  report_stream(s, by);
  sim_report(s, "; executed are %llu of %llu, the host knows of %llu",
             (unsigned long long)by->executed, (unsigned long long)by->enqueued,
             (unsigned long long)sim_clock_get(&s->host, mark->slot));
  if (stream)
    sim_report(s, ",\n  the receiving stream comes after %llu",
               (unsigned long long)sim_clock_get(&stream->clock, mark->slot));
  sim_report(s, "\n");
}

/* ---- stretches --------------------------------------------------------- */

void sim_physical_init(sim *s, sim_physical *p)
{
  (void)s;
  p->stretches = sim_grow(NULL, 0, &p->stretch_capacity, sizeof *p->stretches);
  p->stretches[0] = (sim_stretch){0, p->size, NULL, 0, 0};
  p->stretch_count = 1;
}

void sim_physical_destroy(sim *s, sim_physical *p)
{
  for (size_t i = 0; i < p->stretch_count; i++)
    marks_drop(s, p->stretches[i].marks);
  free(p->stretches);
  p->stretches = NULL;
  p->stretch_count = 0;
}

/* The stretch that holds `offset`. */
static size_t stretch_at(const sim_physical *p, size_t offset)
{
  size_t low = 0, high = p->stretch_count;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (p->stretches[middle].begin <= offset)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Makes a stretch begin at `offset`, and says which. */
static size_t stretch_cut(sim_physical *p, size_t offset)
{
  if (offset >= p->size)
    return p->stretch_count;
  size_t i = stretch_at(p, offset);
  if (p->stretches[i].begin == offset)
    return i;
  p->stretches =
      sim_grow(p->stretches, p->stretch_count, &p->stretch_capacity, sizeof *p->stretches);
  memmove(&p->stretches[i + 1], &p->stretches[i], (p->stretch_count - i) * sizeof *p->stretches);
  p->stretch_count++;
  p->stretches[i].end = p->stretches[i + 1].begin = offset;
  if (p->stretches[i].marks)
    p->stretches[i].marks->references++;
  return i + 1;
}

/* Joins what is equal in and around the stretches from first to last. */
static void stretch_join(sim *s, sim_physical *p, size_t first, size_t last)
{
  size_t to = first ? first - 1 : 0;
  size_t end = last < p->stretch_count ? last + 1 : p->stretch_count;
  for (size_t i = to; i < end; i++) /* nobody's any more, in either sense */
    if (!p->stretches[i].marks && !p->stretches[i].live)
      p->stretches[i].owner = 0;
  size_t from = to + 1;
  for (; from < end; from++) {
    sim_stretch *a = &p->stretches[to], *b = &p->stretches[from];
    if (a->marks == b->marks && a->owner == b->owner && a->live == b->live) {
      a->end = b->end;
      marks_drop(s, b->marks);
    } else {
      p->stretches[++to] = *b;
    }
  }
  if (++to == end)
    return;
  memmove(&p->stretches[to], &p->stretches[end], (p->stretch_count - end) * sizeof *p->stretches);
  p->stretch_count -= end - to;
}

/* A piece of an address range that lies in one physical allocation. */
typedef struct piece {
  sim_physical *physical;
  uintptr_t address;
  size_t offset, size;
} piece;

/* The piece that begins at `address`; 0, after a report by `who`, when there is
 * no memory of the device (-1: of any). */
static int piece_at(sim *s, const char *who, int device, uintptr_t address, uintptr_t end, piece *p)
{
  sim_span *span = sim_span_find(s, address);
  if (!span || (device >= 0 && span->physical->device != device)) {
    sim_report(s, "%s: there is no memory at 0x%zx, or not of device %d\n", who, (size_t)address,
               device);
    return 0;
  }
  p->physical = span->physical;
  p->address = address;
  p->offset = address - span->begin;
  p->size = (span->end < end ? span->end : end) - address;
  return 1;
}

/* Whether the live owner has the page by this address: one that is mapped at
 * several may well be in use by another. */
static int is_behind(const sim *s, const sim_physical *p, uintptr_t address, uint64_t id)
{
  const sim_owner *owner = owner_slot(s, id);
  return p->mappings <= 1 || owner->id != id ||
         (owner->address < address + p->size && owner->address + owner->size > address);
}

int sim_physical_is_busy(sim *s, sim_physical *p, uintptr_t address, const char *who)
{
  for (size_t i = 0; i < p->stretch_count; i++) {
    const sim_stretch *t = &p->stretches[i];
    if (t->live && is_behind(s, p, address, t->owner)) {
      sim_report(s, "%s of memory at 0x%zx that is live: ", who, (size_t)(address + t->begin));
      report_owner(s, t->owner);
      sim_report(s, "\n");
      return 1;
    }
    for (uint32_t k = 0; t->marks && k < t->marks->count; k++) {
      const sim_mark *mark = &t->marks->at[k];
      if (mark_is_over(s, mark) || mark->mapping != address)
        continue;
      sim_report(s, "%s of memory at 0x%zx that is still accessed\n", who,
                 (size_t)(address + t->begin));
      report_mark(s, mark, NULL);
      return 1;
    }
  }
  return 0;
}

/* ---- accesses ---------------------------------------------------------- */

uint64_t sim_oracle_owner(sim *s, const char *who, uintptr_t address, size_t size)
{
  uint64_t owner = 0;
  piece p;
  for (uintptr_t a = address; a < address + size; a += p.size) {
    if (!piece_at(s, who, -1, a, address + size, &p))
      return 0;
    for (size_t i = stretch_at(p.physical, p.offset);
         i < p.physical->stretch_count && p.physical->stretches[i].begin < p.offset + p.size; i++) {
      const sim_stretch *t = &p.physical->stretches[i];
      if (t->live && (owner == 0 || owner == t->owner)) {
        owner = t->owner;
        continue;
      }
      sim_report(s, "%s of [0x%zx, +%zu): not within one live allocation: ", who, (size_t)address,
                 size);
      report_owner(s, t->owner);
      sim_report(s, t->live ? "\n" : " is freed\n");
      return 0;
    }
  }
  return owner;
}

/* The access replaces a mark that it comes after; but not one by another of the
 * page's addresses, whose mapping may go before this access is over. */
static int is_replaced(sim *s, const sim_mark *old, const sim_stream *stream, const sim_mark *mark,
                       int aliased)
{
  if (aliased && old->mapping != mark->mapping)
    return mark_is_over(s, old);
  return mark_is_before(s, old, stream);
}

/* The old marks that stay, and the access. `common` is the set of the access
 * alone, made when first needed. */
static sim_marks *marks_after(sim *s, const sim_marks *old, const sim_stream *stream,
                              const sim_mark *mark, int aliased, sim_marks **common)
{
  uint32_t keep = 0;
  for (uint32_t i = 0; old && i < old->count; i++)
    if (!is_replaced(s, &old->at[i], stream, mark, aliased))
      keep++;
  if (keep == 0) {
    if (!*common) {
      *common = marks_new(s, 1);
      (*common)->at[(*common)->count++] = *mark;
    }
    (*common)->references++;
    return *common;
  }
  sim_marks *marks = marks_new(s, keep + 1);
  for (uint32_t i = 0; i < old->count; i++)
    if (!is_replaced(s, &old->at[i], stream, mark, aliased))
      marks->at[marks->count++] = old->at[i];
  marks->at[marks->count++] = *mark;
  return marks;
}

/* A replay touches memory that its capture was given. Memory that now is
 * somebody else's, who is not of the same capture or group of captures, must
 * not be there. */
static int replay_may_touch(sim *s, const sim_stretch *t, uint64_t owner)
{
  if (!t->live || t->owner == owner)
    return 1;
  const sim_owner *now = owner_slot(s, t->owner), *then = owner_slot(s, owner);
  return then->id != owner || now->id != t->owner ||
         (now->capture && now->capture == then->capture) ||
         (now->group && now->group == then->group);
}

int sim_oracle_access(sim *s, sim_stream *stream, uint64_t index, uint32_t node, uintptr_t address,
                      size_t size, uint64_t owner)
{
  sim_mark mark = {stream->slot, owner && node == SIM_NONE ? REPLAYED : node, index, owner, 0};
  if (node != SIM_NONE) {
    mark.slot = SIM_NONE;
    mark.index = stream->capture->id;
  }
  sim_marks *common = NULL;
  uint64_t common_owner = 0;
  uintptr_t common_mapping = 0;
  int fine = 1;
  piece p;
  for (uintptr_t a = address; fine && a < address + size; a += p.size) {
    fine = piece_at(s, "access", -1, a, address + size, &p);
    if (!fine)
      break;
    mark.mapping = p.address - p.offset;
    size_t first = stretch_cut(p.physical, p.offset);
    size_t last = stretch_cut(p.physical, p.offset + p.size);
    for (size_t i = first; i < last; i++) {
      sim_stretch *t = &p.physical->stretches[i];
      if (owner && !replay_may_touch(s, t, owner)) {
        sim_report(s, "a replay on ");
        report_stream(s, stream);
        sim_report(s, " touches [0x%zx, +%zu) for ", (size_t)address, size);
        report_owner(s, owner);
        sim_report(s, ",\n  which now belongs to ");
        report_owner(s, t->owner);
        sim_report(s, "\n");
        fine = 0;
        break;
      }
      mark.owner = owner ? owner : t->owner;
      if (common && (common_owner != mark.owner || common_mapping != mark.mapping)) {
        marks_drop(s, common);
        common = NULL;
      }
      common_owner = mark.owner;
      common_mapping = mark.mapping;
      sim_marks *marks = marks_after(s, t->marks, stream, &mark, p.physical->mappings > 1, &common);
      marks_drop(s, t->marks);
      t->marks = marks;
    }
    stretch_join(s, p.physical, first, last);
  }
  marks_drop(s, common);
  return fine;
}

/* ---- owners ------------------------------------------------------------ */

/* Reports when `report` is set. */
static int all_is_ordered(sim *s, uintptr_t address, size_t size, const sim_stream *stream,
                          int report)
{
  piece p;
  for (uintptr_t a = address; a < address + size; a += p.size) {
    if (!piece_at(s, "handout", stream->device, a, address + size, &p))
      return 0;
    for (size_t i = stretch_at(p.physical, p.offset);
         i < p.physical->stretch_count && p.physical->stretches[i].begin < p.offset + p.size; i++) {
      const sim_stretch *t = &p.physical->stretches[i];
      if (t->live) {
        if (!report)
          return 0;
        sim_report(s, "[0x%zx, +%zu) was handed out while it is live: ", (size_t)address, size);
        report_owner(s, t->owner);
        sim_report(s, "\n");
        return 0;
      }
      for (uint32_t k = 0; t->marks && k < t->marks->count; k++) {
        if (mark_is_before(s, &t->marks->at[k], stream))
          continue;
        if (!report)
          return 0;
        sim_report(s, "[0x%zx, +%zu) was handed out on ", (size_t)address, size);
        report_stream(s, stream);
        sim_report(s,
                   "%s\n  but an access at 0x%zx is not ordered before "
                   "that stream's future:\n",
                   stream->capture ? ", which is being captured," : "",
                   (size_t)(p.address - p.offset + t->begin));
        report_mark(s, &t->marks->at[k], stream);
        return 0;
      }
    }
  }
  return 1;
}

/* Forgets the marks that are over for everybody. */
static void prune(sim *s, sim_stretch *t)
{
  if (!t->marks)
    return;
  uint32_t keep = 0;
  for (uint32_t k = 0; k < t->marks->count; k++)
    keep += !mark_is_over(s, &t->marks->at[k]);
  if (keep == t->marks->count)
    return;
  sim_marks *marks = keep ? marks_new(s, keep) : NULL;
  for (uint32_t k = 0; keep && k < t->marks->count; k++)
    if (!mark_is_over(s, &t->marks->at[k]))
      marks->at[marks->count++] = t->marks->at[k];
  marks_drop(s, t->marks);
  t->marks = marks;
}

void sim_owner_begin(sim *s, const void *pointer, size_t size, int device, void *handle)
{
  if (!s->options.oracle)
    return;
  sim_enter(s);
  uintptr_t address = (uintptr_t)pointer;
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_owner_begin");
  if (stream && all_is_ordered(s, address, size, stream, 1)) {
    uint64_t id = ++s->owner_count;
    const sim_graph *capture = sim_capture_of(stream);
    *owner_slot(s, id) = (sim_owner){id,
                                     address,
                                     size,
                                     device,
                                     stream->id,
                                     capture ? capture->id : 0,
                                     stream->capture ? stream->capture->group : 0};
    piece p;
    for (uintptr_t a = address; a < address + size; a += p.size) {
      if (!piece_at(s, "handout", device, a, address + size, &p))
        break;
      size_t first = stretch_cut(p.physical, p.offset);
      size_t last = stretch_cut(p.physical, p.offset + p.size);
      for (size_t i = first; i < last; i++) {
        prune(s, &p.physical->stretches[i]);
        p.physical->stretches[i].owner = id;
        p.physical->stretches[i].live = 1;
      }
      stretch_join(s, p.physical, first, last);
    }
  }
  sim_leave(s);
}

/* Ends the owner's stretches of one physical allocation from `offset` on; how
 * many bytes they were, up to the first that is not the owner's. */
static size_t owner_end_in(sim *s, sim_physical *p, size_t offset, uint64_t id)
{
  size_t first = stretch_at(p, offset), i = first;
  for (; i < p->stretch_count; i++) {
    sim_stretch *t = &p->stretches[i];
    if (!t->live || t->owner != id)
      break;
    t->live = 0;
  }
  if (i == first)
    return 0;
  size_t size = p->stretches[i - 1].end - offset;
  stretch_join(s, p, first, i);
  return size;
}

void sim_owner_end(sim *s, const void *pointer)
{
  if (!s->options.oracle)
    return;
  sim_enter(s);
  uintptr_t a = (uintptr_t)pointer;
  sim_span *span = sim_span_find(s, a);
  const sim_stretch *t = NULL;
  if (span)
    t = &span->physical->stretches[stretch_at(span->physical, a - span->begin)];
  uint64_t id = t && t->live && t->begin == a - span->begin ? t->owner : 0;
  if (id == 0 || (owner_slot(s, id)->id == id && owner_slot(s, id)->address != a))
    sim_report(s, "sim_owner_end: no live allocation begins at %p\n", pointer);
  else
    for (size_t size; span; span = sim_span_find(s, a)) {
      size = owner_end_in(s, span->physical, a - span->begin, id);
      a += size;
      if (size == 0 || a < span->end)
        break;
    }
  sim_leave(s);
}

int sim_is_ordered(sim *s, const void *address, size_t size, int device, void *handle)
{
  if (!s->options.oracle)
    return 1;
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "sim_is_ordered");
  int ordered = stream && all_is_ordered(s, (uintptr_t)address, size, stream, 0);
  sim_leave(s);
  return ordered;
}

/* ---- patterns ---------------------------------------------------------- */

/* Every granule holds the number of the owner that wrote it last. Numbers
 * rise with every handout, so a greater one than one's own means that a later
 * owner was there before this access was over. */
void sim_pattern_access(sim *s, const sim_op *op)
{
  if (!s->options.backed || !op->owner)
    return;
  uintptr_t a = (op->address + GRANULE - 1) / GRANULE * GRANULE;
  for (; a + sizeof(uint64_t) <= op->address + op->size; a += GRANULE) {
    uint64_t *content = (uint64_t *)a;
    if (*content > op->owner) {
      sim_report(s, "the content at 0x%zx was overwritten by ", (size_t)a);
      report_owner(s, *content);
      sim_report(s, "\n  before an access by ");
      report_owner(s, op->owner);
      sim_report(s, " had run\n");
      return;
    }
    if (op->access & SIM_WRITE)
      *content = op->owner;
  }
}

void sim_oracle_destroy(sim *s)
{
  for (size_t i = 0; i < sizeof s->free_marks / sizeof *s->free_marks; i++)
    while (s->free_marks[i]) {
      sim_marks *next = s->free_marks[i]->next_free;
      free(s->free_marks[i]);
      s->free_marks[i] = next;
    }
  free(s->host.at);
  free(s->owners);
}
