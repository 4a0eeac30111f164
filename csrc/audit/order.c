/* order.c: what comes before what. */
#include "order.h"

#include <stdlib.h>
#include <string.h>

static uint64_t key_of(audit_stream name)
{
  return name.handle ^ ((uint64_t)(unsigned)name.device << 56);
}

/* A lane that nothing is enqueued on yet. */
static void lane_begin(audit *a, lane *l)
{
  if (a->free_count == 0) {
    *l = (lane){.slot = a->slot_count++, .now = 1};
    return;
  }
  a->free_count--;
  *l = (lane){.slot = a->free_slots[a->free_count], .now = a->free_epochs[a->free_count]};
}

static void lane_end(lane *l)
{
  clock_clear(&l->after);
  clock_copy_drop(l->copy);
  l->copy = NULL;
}

stream *order_stream(audit *a, audit_stream name)
{
  stream *s = table_get(&a->stream_names, key_of(name));
  if (s)
    return s;
  s = audit_new(sizeof *s);
  if (!s || !audit_reserve((void **)&a->streams, &a->stream_capacity, a->stream_count, sizeof s) ||
      !table_put(&a->stream_names, key_of(name), s)) {
    a->lost = 1;
    free(s);
    return NULL;
  }
  s->name = name;
  s->number = (uint32_t)a->stream_count;
  lane_begin(a, &s->outside);
  a->streams[a->stream_count++] = s;
  return s;
}

/* `l` comes after all that `other` says. */
static void lane_join(audit *a, lane *l, const clock_vector *other)
{
  int changed = 0;
  if (!clock_join(&l->after, other, &changed))
    a->lost = 1;
  if (changed) {
    clock_copy_drop(l->copy);
    l->copy = NULL;
  }
}

static void lane_raise(audit *a, lane *l, uint32_t slot, uint64_t epoch)
{
  if (!clock_raise(&l->after, slot, epoch))
    a->lost = 1;
  clock_copy_drop(l->copy);
  l->copy = NULL;
}

lane *order_outside(audit *a, stream *s)
{
  lane *l = &s->outside;
  if (l->host_version != a->host_version) {
    lane_join(a, l, &a->host);
    l->host_version = a->host_version;
  }
  return l;
}

lane *order_lane(audit *a, stream *s)
{
  return s->capture ? &s->branch : order_outside(a, s);
}

lane *order_lane_with(audit *a, stream *s, uint32_t slot)
{
  if (s->outside.slot == slot)
    return order_outside(a, s);
  return s->capture && s->branch.slot == slot ? &s->branch : NULL;
}

/* ---- events -------------------------------------------------------------- */

void audit_record(audit *a, uint64_t name, audit_stream where)
{
  stream *s = order_stream(a, where);
  event *e = table_get(&a->events, name);
  if (!s)
    return;
  if (!e) {
    e = audit_new(sizeof *e);
    if (!e || !table_put(&a->events, name, e)) {
      a->lost = 1;
      free(e);
      return;
    }
  }
  lane *l = order_lane(a, s);
  if (!l->copy)
    l->copy = clock_copy_make(&l->after);
  clock_copy_drop(e->after);
  *e = (event){l->slot, l->now++, l->copy, s->capture ? s->capture->id : 0};
  if (e->after)
    e->after->references++;
  else
    a->lost = 1;
}

void audit_wait(audit *a, audit_stream where, uint64_t name)
{
  const event *e = table_get(&a->events, name);
  stream *s = e ? order_stream(a, where) : NULL;
  if (!s)
    return;
  if (e->capture) {
    capture *c = table_get(&a->captures, e->capture);
    if (!c)
      return; /* it is over, and its events say nothing */
    if (!s->capture)
      order_join_capture(a, s, c);
  }
  if ((s->capture ? s->capture->id : 0) != e->capture)
    return;
  lane *l = order_lane(a, s);
  /* What came before the event was learnt together with the event. */
  if (order_covers(l, e->slot, e->epoch))
    return;
  lane_raise(a, l, e->slot, e->epoch);
  if (e->after)
    lane_join(a, l, &e->after->clock);
}

void audit_event_destroyed(audit *a, uint64_t name)
{
  event *e = table_remove(&a->events, name);
  if (e)
    clock_copy_drop(e->after);
  free(e);
}

/* ---- the host ------------------------------------------------------------ */

static void host_learn(audit *a, uint32_t slot, uint64_t epoch, const clock_vector *after)
{
  int changed = clock_get(&a->host, slot) < epoch;
  if (!clock_raise(&a->host, slot, epoch) || (after && !clock_join(&a->host, after, &changed)))
    a->lost = 1;
  a->host_version += changed != 0;
}

void audit_event_synchronized(audit *a, uint64_t name)
{
  const event *e = table_get(&a->events, name);
  if (e && !e->capture)
    host_learn(a, e->slot, e->epoch, e->after ? &e->after->clock : NULL);
}

static void stream_synchronized(audit *a, stream *s)
{
  lane *l = &s->outside;
  host_learn(a, l->slot, l->now++, &l->after);
}

void audit_stream_synchronized(audit *a, audit_stream name)
{
  stream *s = order_stream(a, name);
  if (s && !s->capture)
    stream_synchronized(a, s);
}

void audit_device_synchronized(audit *a, int device)
{
  for (size_t i = 0; i < a->stream_count; i++)
    if (a->streams[i]->name.device == device)
      stream_synchronized(a, a->streams[i]);
}

/* ---- captures ------------------------------------------------------------ */

void order_join_capture(audit *a, stream *s, capture *c)
{
  s->capture = c;
  lane_begin(a, &s->branch);
}

void order_leave_capture(audit *a, stream *s)
{
  lane *l = &s->branch;
  order_drop_hazards(a, l);
  lane_end(l);
  s->capture = NULL;
  /* Otherwise the slot is not used again. */
  if (audit_reserve((void **)&a->free_slots, &a->free_slots_capacity, a->free_count,
                    sizeof(uint32_t)) &&
      audit_reserve((void **)&a->free_epochs, &a->free_epochs_capacity, a->free_count,
                    sizeof(uint64_t))) {
    a->free_slots[a->free_count] = l->slot;
    a->free_epochs[a->free_count++] = l->now + 1;
  }
}

/* ---- hazards ------------------------------------------------------------- */

void order_drop_hazards(audit *a, lane *l)
{
  while (l->hazards) {
    hazard *h = l->hazards;
    l->hazards = h->next;
    a->bytes -= sizeof *h;
    free(h);
  }
}

void order_destroy(audit *a)
{
  for (size_t i = 0; i < a->stream_count; i++) {
    stream *s = a->streams[i];
    order_drop_hazards(a, &s->outside);
    order_drop_hazards(a, &s->branch);
    lane_end(&s->outside);
    lane_end(&s->branch);
    free(s);
  }
  for (size_t i = 0; i < a->events.capacity; i++) {
    event *e = a->events.at[i].value;
    if (e)
      clock_copy_drop(e->after);
    free(e);
  }
  clock_clear(&a->host);
  table_clear(&a->stream_names);
  table_clear(&a->events);
  free(a->streams);
  free(a->free_slots);
  free(a->free_epochs);
}
