/* accesses.c: the accesses to physical memory that may still be running.
 *
 * Physical memory is cut into stretches. Each has a set of marks: the accesses that somebody may
 * not be ordered after yet. An access replaces the marks that it is ordered after itself, because
 * whatever comes after it comes after those, too. So sets stay small. Sets are shared and
 * counted. */
#include "accesses.h"

#include <stdlib.h>
#include <string.h>

#include "address.h"
#include "base.h"
#include "clock.h"
#include "graph.h"
#include "stream.h"

/* ---- marks ------------------------------------------------------------- */

sim_marks *sim_marks_new(sim *s, uint32_t count)
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

void sim_marks_drop(sim *s, sim_marks *marks)
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

sim_owner *sim_owner_slot(const sim *s, uint64_t id)
{
  return &s->owners[id % SIM_OWNERS];
}

/* Whether the mark can no longer matter: the host knows that the access is over, or it was a node
 * of a capture that has ended, whose replays are operations of their own. */
int sim_mark_is_over(sim *s, const sim_mark *mark)
{
  if (mark->slot == SIM_NONE)
    return !sim_capture_lasts(s, mark->index);
  if (sim_clock_get(&s->host, mark->slot) >= mark->index)
    return 1;
  return s->options.oracle == SIM_ORACLE_EXECUTED &&
         s->streams[mark->slot]->executed >= mark->index;
}

/* Within a group replays run in the order of their captures, even if one of the captures was
 * invalidated meanwhile. */
sim_future sim_future_of(const sim_stream *stream)
{
  return (sim_future){&stream->clock, sim_capture_of(stream), &stream->tails,
                      stream->capture ? stream->capture->group : 0};
}

int sim_mark_is_before_future(sim *s, const sim_mark *mark, const sim_future *f)
{
  if (sim_mark_is_over(s, mark))
    return 1;
  if (mark->slot == SIM_NONE)
    return f->capture && sim_capture_is_after(s, f->capture, f->tails, mark->index, mark->node);
  const sim_owner *owner = sim_owner_slot(s, mark->owner);
  if (f->group && mark->node == SIM_REPLAYED && owner->id == mark->owner &&
      owner->group == f->group)
    return 1;
  /* Captured work runs at some later launch, so nothing outside orders it. */
  return !f->capture && sim_clock_get(f->clock, mark->slot) >= mark->index;
}

int sim_mark_is_before(sim *s, const sim_mark *mark, const sim_stream *stream)
{
  sim_future future = sim_future_of(stream);
  return sim_mark_is_before_future(s, mark, &future);
}

void sim_report_stream(sim *s, const sim_stream *stream)
{
  sim_report(s, "stream %llu (device %d, handle %p%s)", (unsigned long long)stream->id,
             stream->device, sim_stream_handle(stream), stream->alive ? "" : ", destroyed");
}

void sim_report_owner(sim *s, uint64_t id)
{
  const sim_owner *owner = sim_owner_slot(s, id);
  if (id == 0 || owner->id != id) {
    sim_report(s, "owner #%llu", (unsigned long long)id);
    return;
  }
  sim_report(s, "owner #%llu ([0x%zx, +%zu) of stream %llu, device %d%s)", (unsigned long long)id,
             (size_t)owner->address, owner->size, (unsigned long long)owner->stream, owner->device,
             owner->capture ? ", in a capture" : "");
}

void sim_report_mark(sim *s, const sim_mark *mark, const sim_stream *stream)
{
  sim_report(s, "  by ");
  sim_report_owner(s, mark->owner);
  if (mark->slot == SIM_NONE) {
    sim_report(s, ", node %u of capture %llu\n", mark->node, (unsigned long long)mark->index);
    return;
  }
  const sim_stream *by = s->streams[mark->slot];
  sim_report(s, ",\n  operation %llu of ", (unsigned long long)mark->index);
  sim_report_stream(s, by);
  sim_report(s, "; executed are %llu of %llu, the host knows of %llu",
             (unsigned long long)by->executed, (unsigned long long)by->enqueued,
             (unsigned long long)sim_clock_get(&s->host, mark->slot));
  if (stream)
    sim_report(s, ",\n  that stream comes after %llu",
               (unsigned long long)sim_clock_get(&stream->clock, mark->slot));
  sim_report(s, "\n");
}

/* ---- stretches --------------------------------------------------------- */

void sim_physical_init(sim *s, sim_physical *p)
{
  (void)s;
  p->stretches = sim_grow(NULL, 0, &p->stretch_capacity, sizeof *p->stretches);
  p->stretches[0] = (sim_stretch){.end = p->size};
  p->stretch_count = 1;
}

void sim_physical_destroy(sim *s, sim_physical *p)
{
  for (size_t i = 0; i < p->stretch_count; i++)
    sim_marks_drop(s, p->stretches[i].marks);
  free(p->stretches);
  p->stretches = NULL;
  p->stretch_count = 0;
}

/* The stretch that holds `offset`. */
size_t sim_stretch_at(const sim_physical *p, size_t offset)
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

/* Makes a stretch begin at `offset` and returns its number. */
size_t sim_stretch_cut(sim_physical *p, size_t offset)
{
  if (offset >= p->size)
    return p->stretch_count;
  size_t i = sim_stretch_at(p, offset);
  if (p->stretches[i].begin == offset)
    return i;
  p->stretches =
      sim_grow(p->stretches, p->stretch_count, &p->stretch_capacity, sizeof *p->stretches);
  memmove(&p->stretches[i + 1], &p->stretches[i], (p->stretch_count - i) * sizeof *p->stretches);
  p->stretch_count++;
  p->stretches[i].end = p->stretches[i + 1].begin = offset;
  if (p->stretches[i].copy)
    p->stretches[i + 1].copy += offset - p->stretches[i].begin;
  if (p->stretches[i].marks)
    p->stretches[i].marks->references++;
  return i + 1;
}

static int is_like(const sim_stretch *a, const sim_stretch *b)
{
  uintptr_t copy = a->copy ? a->copy + (a->end - a->begin) : 0;
  return a->marks == b->marks && a->owner == b->owner && a->live == b->live &&
         a->absent == b->absent && copy == b->copy && a->copy_slot == b->copy_slot &&
         a->copy_index == b->copy_index && a->fill_slot == b->fill_slot &&
         a->fill_index == b->fill_index;
}

/* Joins equal neighbours in and around the stretches from first to last. */
void sim_stretch_join(sim *s, sim_physical *p, size_t first, size_t last)
{
  size_t to = first ? first - 1 : 0;
  size_t end = last < p->stretch_count ? last + 1 : p->stretch_count;
  for (size_t i = to; i < end; i++) /* neither owned nor accessed */
    if (!p->stretches[i].marks && !p->stretches[i].live)
      p->stretches[i].owner = 0;
  size_t from = to + 1;
  for (; from < end; from++) {
    sim_stretch *a = &p->stretches[to], *b = &p->stretches[from];
    if (is_like(a, b)) {
      a->end = b->end;
      sim_marks_drop(s, b->marks);
    } else {
      p->stretches[++to] = *b;
    }
  }
  if (++to == end)
    return;
  memmove(&p->stretches[to], &p->stretches[end], (p->stretch_count - end) * sizeof *p->stretches);
  p->stretch_count -= end - to;
}

/* Finds the piece that begins at `address`. Reports, naming `who`, and returns 0 if the device (-1:
 * any) has no memory there. */
int sim_piece_at(sim *s, const char *who, int device, uintptr_t address, uintptr_t end,
                 sim_piece *p)
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

/* ---- contents ---------------------------------------------------------- */

/* Whether a live stretch may lose its page: the host has a copy and knows it, or the program allows
 * the loss. */
static int contents_are_safe(const sim *s, const sim_stretch *t)
{
  int zero = t->copy_index && !t->copy; /* it was lost before */
  return t->absent || s->may_lose || zero ||
         (t->copy && sim_clock_get(&s->host, t->copy_slot) >= t->copy_index);
}

int sim_contents_are_there(sim *s, const char *who, const sim_stretch *t, const sim_stream *stream,
                           uintptr_t address)
{
  sim_mark fill = {.slot = t->fill_slot, .node = SIM_NONE, .index = t->fill_index};
  if (!t->absent && (!t->fill_index || sim_mark_is_before(s, &fill, stream)))
    return 1;
  sim_report(s, "%s of memory at 0x%zx before its contents are back from their sleep: ", who,
             (size_t)address);
  sim_report_owner(s, t->owner);
  sim_report(s, "\n");
  return 0;
}

int sim_is_behind(const sim *s, const sim_physical *p, uintptr_t address, uint64_t id)
{
  const sim_owner *owner = sim_owner_slot(s, id);
  return p->mappings <= 1 || owner->id != id ||
         (owner->address < address + p->size && owner->address + owner->size > address);
}

int sim_physical_is_busy(sim *s, sim_physical *p, uintptr_t address, const char *who)
{
  for (size_t i = 0; i < p->stretch_count; i++) {
    const sim_stretch *t = &p->stretches[i];
    int sleeps = p->page && contents_are_safe(s, t);
    if (t->live && !sleeps && sim_is_behind(s, p, address, t->owner)) {
      sim_report(s, "%s of memory at 0x%zx that is live: ", who, (size_t)(address + t->begin));
      sim_report_owner(s, t->owner);
      sim_report(s, "\n");
      return 1;
    }
    for (uint32_t k = 0; t->marks && k < t->marks->count; k++) {
      const sim_mark *mark = &t->marks->at[k];
      if (sim_mark_is_over(s, mark) || mark->mapping != address)
        continue;
      sim_report(s, "%s of memory at 0x%zx that is still accessed\n", who,
                 (size_t)(address + t->begin));
      sim_report_mark(s, mark, NULL);
      return 1;
    }
  }
  return 0;
}

void sim_marks_destroy(sim *s)
{
  for (size_t i = 0; i < sizeof s->free_marks / sizeof *s->free_marks; i++)
    while (s->free_marks[i]) {
      sim_marks *next = s->free_marks[i]->next_free;
      free(s->free_marks[i]);
      s->free_marks[i] = next;
    }
}
