/* causes.c: waits that are missing. */
#include "causes.h"

#include "findings.h"
#include "order.h"

static size_t assumed_waits(const audit *a)
{
  return a->assumed_count < AUDIT_ASSUMED ? (size_t)a->assumed_count : AUDIT_ASSUMED;
}

size_t cause_of(const audit *a, const lane *l, uint32_t slot, uint64_t epoch)
{
  size_t cause = AUDIT_NO_CAUSE;
  for (size_t i = 0; i < assumed_waits(a); i++) {
    const assumed_wait *w = &a->assumed[i];
    if (w->finding < cause && clock_get(&w->before, slot) >= epoch &&
        order_covers(l, w->slot, w->epoch))
      cause = w->finding;
  }
  return cause;
}

/* The one of that finding on that lane, or a new one. */
static assumed_wait *place_for(audit *a, size_t finding, uint32_t slot)
{
  for (size_t i = 0; i < assumed_waits(a); i++)
    if (a->assumed[i].finding == finding && a->assumed[i].slot == slot)
      return &a->assumed[i];
  return &a->assumed[a->assumed_count++ % AUDIT_ASSUMED];
}

/* As if the lane waited now for all that the stream which has the slot was given so far, and for
 * what that would come after by earlier assumed waits. */
static void assume_wait(audit *a, size_t finding, const lane *l, audit_stream other, uint32_t slot,
                        uint64_t epoch)
{
  stream *s = order_stream(a, other);
  lane *o = s ? order_lane_with(a, s, slot) : NULL;
  clock_vector before = {0, NULL};
  int changed = 0, known = clock_raise(&before, slot, o ? o->now++ : epoch);
  if (o)
    known &= clock_join(&before, &o->after, &changed);
  for (size_t i = 0; o && i < assumed_waits(a); i++)
    if (order_covers(o, a->assumed[i].slot, a->assumed[i].epoch))
      known &= clock_join(&before, &a->assumed[i].before, &changed);
  a->lost |= !known;
  assumed_wait *w = place_for(a, finding, l->slot);
  clock_clear(&w->before);
  *w = (assumed_wait){finding, l->slot, l->now, before};
}

void cause_add(audit *a, const audit_finding *finding, const lane *l, uint32_t slot, uint64_t epoch)
{
  const size_t before = a->finding_count;
  audit_finding *added = finding_add(a, finding);
  if (!added)
    return;
  const size_t cause =
      finding->cause != AUDIT_NO_CAUSE ? finding->cause : cause_of(a, l, slot, epoch);
  if (cause == AUDIT_NO_CAUSE) {
    added->stands_alone = 1;
    assume_wait(a, (size_t)(added - a->findings), l, finding->earlier.stream, slot, epoch);
  } else if (a->finding_count > before) {
    added->cause = cause;
  }
}

void causes_forget(audit *a, const lane *l)
{
  for (size_t i = 0; i < assumed_waits(a); i++)
    if (a->assumed[i].slot == l->slot)
      clock_clear(&a->assumed[i].before); /* covers nothing */
}
