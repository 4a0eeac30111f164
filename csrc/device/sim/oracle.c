/* oracle.c: the oracle. It checks every handout and every access and, if addresses are host memory,
 * every content. */
#include "oracle.h"

#include <stdlib.h>

#include "accesses.h"
#include "address.h"
#include "base.h"
#include "contents.h"
#include "follow.h"
#include "graph.h"
#include "stream.h"

enum { GRANULE = 512 };

/* ---- accesses ---------------------------------------------------------- */

uint64_t sim_oracle_owner(sim *s, const char *who, uintptr_t address, size_t size)
{
  uint64_t owner = 0;
  sim_piece p;
  for (uintptr_t a = address; a < address + size; a += p.size) {
    if (!sim_piece_at(s, who, -1, a, address + size, &p))
      return 0;
    for (size_t i = sim_stretch_at(p.physical, p.offset);
         i < p.physical->stretch_count && p.physical->stretches[i].begin < p.offset + p.size; i++) {
      const sim_stretch *t = &p.physical->stretches[i];
      if (t->live && (owner == 0 || owner == t->owner)) {
        owner = t->owner;
        continue;
      }
      sim_report(s, "%s of [0x%zx, +%zu): not within one live allocation: ", who, (size_t)address,
                 size);
      sim_report_owner(s, t->owner);
      sim_report(s, t->live ? "\n" : " is freed\n");
      return 0;
    }
  }
  return owner;
}

/* Whether the access replaces a mark: it must come after it. If the page is mapped at several
 * addresses, only a mark at the same one is replaced, because the other mapping may go before this
 * access is over. */
static int is_replaced(sim *s, const sim_mark *old, const sim_stream *stream, const sim_mark *mark,
                       int aliased)
{
  if (aliased && old->mapping != mark->mapping)
    return sim_mark_is_over(s, old);
  return sim_mark_is_before(s, old, stream);
}

/* The old marks that stay, plus the access. `common` is the set of only the access, made when first
 * needed. */
static sim_marks *marks_after(sim *s, const sim_marks *old, const sim_stream *stream,
                              const sim_mark *mark, int aliased, sim_marks **common)
{
  uint32_t keep = 0;
  for (uint32_t i = 0; old && i < old->count; i++)
    if (!is_replaced(s, &old->at[i], stream, mark, aliased))
      keep++;
  if (keep == 0) {
    if (!*common) {
      *common = sim_marks_new(s, 1);
      (*common)->at[(*common)->count++] = *mark;
    }
    (*common)->references++;
    return *common;
  }
  sim_marks *marks = sim_marks_new(s, keep + 1);
  for (uint32_t i = 0; i < old->count; i++)
    if (!is_replaced(s, &old->at[i], stream, mark, aliased))
      marks->at[marks->count++] = old->at[i];
  marks->at[marks->count++] = *mark;
  return marks;
}

/* A replay touches memory that its capture was given. It is a failure if that memory now has
 * another owner who is not of the same capture or group of captures. */
static int replay_may_touch(sim *s, const sim_stretch *t, uint64_t owner)
{
  if (!t->live || t->owner == owner)
    return 1;
  const sim_owner *now = sim_owner_slot(s, t->owner), *then = sim_owner_slot(s, owner);
  return then->id != owner || now->id != t->owner ||
         (now->capture && now->capture == then->capture) ||
         (now->group && now->group == then->group);
}

/* `own`: an operation of the driver, which moves contents rather than changes them. */
static int note_access(sim *s, sim_stream *stream, uint64_t index, uint32_t node, uintptr_t address,
                       size_t size, uint64_t owner, int own)
{
  sim_mark mark = {stream->slot, owner && node == SIM_NONE ? SIM_REPLAYED : node, index, owner, 0};
  if (node != SIM_NONE) {
    mark.slot = SIM_NONE;
    mark.index = stream->capture->id;
  }
  sim_marks *common = NULL;
  uint64_t common_owner = 0;
  uintptr_t common_mapping = 0;
  int fine = 1;
  sim_piece p;
  for (uintptr_t a = address; fine && a < address + size; a += p.size) {
    fine = sim_piece_at(s, "access", -1, a, address + size, &p);
    if (!fine)
      break;
    mark.mapping = p.address - p.offset;
    size_t first = sim_stretch_cut(p.physical, p.offset);
    size_t last = sim_stretch_cut(p.physical, p.offset + p.size);
    for (size_t i = first; i < last; i++) {
      sim_stretch *t = &p.physical->stretches[i];
      if (owner && !replay_may_touch(s, t, owner)) {
        sim_report(s, "a replay on ");
        sim_report_stream(s, stream);
        sim_report(s, " touches [0x%zx, +%zu) for ", (size_t)address, size);
        sim_report_owner(s, owner);
        sim_report(s, ",\n  which now belongs to ");
        sim_report_owner(s, t->owner);
        sim_report(s, "\n");
        fine = 0;
        break;
      }
      if (!own) {
        if (t->live &&
            !sim_contents_are_there(s, "an access", t, stream, p.address + (t->begin - p.offset))) {
          fine = 0;
          break;
        }
        t->copy = 0;
        t->copy_index = 0;
      }
      mark.owner = owner ? owner : t->owner;
      if (common && (common_owner != mark.owner || common_mapping != mark.mapping)) {
        sim_marks_drop(s, common);
        common = NULL;
      }
      common_owner = mark.owner;
      common_mapping = mark.mapping;
      sim_marks *marks = marks_after(s, t->marks, stream, &mark, p.physical->mappings > 1, &common);
      sim_marks_drop(s, t->marks);
      t->marks = marks;
    }
    sim_stretch_join(s, p.physical, first, last);
  }
  sim_marks_drop(s, common);
  return fine;
}

int sim_oracle_access(sim *s, sim_stream *stream, uint64_t index, uint32_t node, uintptr_t address,
                      size_t size, uint64_t owner)
{
  return note_access(s, stream, index, node, address, size, owner, 0);
}

void sim_oracle_mark(sim *s, sim_stream *stream, uint64_t index, uintptr_t address, size_t size)
{
  note_access(s, stream, index, SIM_NONE, address, size, 0, 1);
}

/* ---- owners ------------------------------------------------------------ */

/* Reports when `report` is set. */
static int all_is_ordered(sim *s, uintptr_t address, size_t size, const sim_stream *stream,
                          int report)
{
  sim_piece p;
  for (uintptr_t a = address; a < address + size; a += p.size) {
    if (!sim_piece_at(s, "handout", stream->device, a, address + size, &p))
      return 0;
    for (size_t i = sim_stretch_at(p.physical, p.offset);
         i < p.physical->stretch_count && p.physical->stretches[i].begin < p.offset + p.size; i++) {
      const sim_stretch *t = &p.physical->stretches[i];
      if (t->live) {
        if (!report)
          return 0;
        sim_report(s, "[0x%zx, +%zu) was handed out while it is live: ", (size_t)address, size);
        sim_report_owner(s, t->owner);
        sim_report(s, "\n");
        return 0;
      }
      for (uint32_t k = 0; t->marks && k < t->marks->count; k++) {
        const sim_mark *mark = &t->marks->at[k];
        sim_follower follower = {0};
        int before = sim_mark_is_before(s, mark, stream);
        if (before && !sim_follower_lacks(s, mark, stream, &follower))
          continue;
        if (!report)
          return 0;
        sim_report(s, "[0x%zx, +%zu) was handed out on ", (size_t)address, size);
        sim_report_stream(s, stream);
        sim_report(s, "%s", stream->capture ? ", which is being captured," : "");
        if (before)
          sim_report_follower(s, &follower);
        sim_report(s, "\n  but an access at 0x%zx is not ordered before that stream's future:\n",
                   (size_t)(p.address - p.offset + t->begin));
        sim_report_mark(s, mark, before ? follower.stream : stream);
        return 0;
      }
    }
  }
  return 1;
}

/* Drops the marks that are over for everybody. */
static void prune(sim *s, sim_stretch *t)
{
  if (!t->marks)
    return;
  uint32_t keep = 0;
  for (uint32_t k = 0; k < t->marks->count; k++)
    keep += !sim_mark_is_over(s, &t->marks->at[k]);
  if (keep == t->marks->count)
    return;
  sim_marks *marks = keep ? sim_marks_new(s, keep) : NULL;
  for (uint32_t k = 0; keep && k < t->marks->count; k++)
    if (!sim_mark_is_over(s, &t->marks->at[k]))
      marks->at[marks->count++] = t->marks->at[k];
  sim_marks_drop(s, t->marks);
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
    *sim_owner_slot(s, id) = (sim_owner){id,
                                         address,
                                         size,
                                         device,
                                         stream->id,
                                         capture ? capture->id : 0,
                                         stream->capture ? stream->capture->group : 0};
    sim_piece p;
    for (uintptr_t a = address; a < address + size; a += p.size) {
      if (!sim_piece_at(s, "handout", device, a, address + size, &p))
        break;
      size_t first = sim_stretch_cut(p.physical, p.offset);
      size_t last = sim_stretch_cut(p.physical, p.offset + p.size);
      for (size_t i = first; i < last; i++) {
        prune(s, &p.physical->stretches[i]);
        p.physical->stretches[i].owner = id;
        p.physical->stretches[i].live = 1;
        p.physical->stretches[i].absent = 0;
        p.physical->stretches[i].copy = 0;
        p.physical->stretches[i].copy_index = 0;
      }
      sim_stretch_join(s, p.physical, first, last);
    }
  }
  sim_leave(s);
}

/* Ends the owner's stretches of one physical allocation from `offset` on. Returns the bytes up to
 * the first that is not the owner's. */
static size_t owner_end_in(sim *s, sim_physical *p, size_t offset, uint64_t id)
{
  size_t first = sim_stretch_at(p, offset), i = first;
  for (; i < p->stretch_count; i++) {
    sim_stretch *t = &p->stretches[i];
    if (!t->live || t->owner != id)
      break;
    t->live = 0;
    t->absent = 0;
  }
  if (i == first)
    return 0;
  size_t size = p->stretches[i - 1].end - offset;
  sim_stretch_join(s, p, first, i);
  return size;
}

/* Ends an owner some of whose memory sleeps. */
static void end_asleep(sim *s, uint64_t id)
{
  const sim_owner *owner = sim_owner_slot(s, id);
  sim_parked_forget(s, id);
  for (uintptr_t a = owner->address; a < owner->address + owner->size;) {
    const sim_span *span = sim_span_find(s, a);
    size_t size = span ? owner_end_in(s, span->physical, a - span->begin, id) : 0;
    a += size ? size : GRANULE;
  }
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
    t = &span->physical->stretches[sim_stretch_at(span->physical, a - span->begin)];
  uint64_t id = t && t->live && t->begin == a - span->begin ? t->owner : 0;
  if (!span)
    id = sim_parked_owner(s, a);
  if (id == 0 || (sim_owner_slot(s, id)->id == id && sim_owner_slot(s, id)->address != a))
    sim_report(s, "sim_owner_end: no live allocation begins at %p\n", pointer);
  else if (sim_is_parked(s, id))
    end_asleep(s, id);
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

/* Every granule holds the number of the owner that last wrote it. Numbers rise with every handout,
 * so a higher number means that a later owner wrote before this access was over. */
void sim_pattern_access(sim *s, const sim_op *op)
{
  if (!s->options.backed || !op->owner)
    return;
  uintptr_t a = (op->address + GRANULE - 1) / GRANULE * GRANULE;
  for (; a + sizeof(uint64_t) <= op->address + op->size; a += GRANULE) {
    uint64_t *content = (uint64_t *)a;
    if (*content > op->owner) {
      sim_report(s, "the content at 0x%zx was overwritten by ", (size_t)a);
      sim_report_owner(s, *content);
      sim_report(s, "\n  before an access by ");
      sim_report_owner(s, op->owner);
      sim_report(s, " had run\n");
      return;
    }
    if (op->access & SIM_WRITE)
      *content = op->owner;
  }
}

void sim_oracle_destroy(sim *s)
{
  sim_marks_destroy(s);
  free(s->host.at);
  free(s->owners);
}
