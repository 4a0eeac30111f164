#include "retire.h"

#include "record.h"

/* Events complete in the order of their numbers. So this asks about the oldest event, then about
 * one twice as far ahead each time the answer was yes. */
void stream_retire(stream_t *s)
{
  if (!(atomic_load_explicit(&s->group->listed, memory_order_relaxed) & group_bit(s)) &&
      !atomic_load_explicit(&s->dropped, memory_order_relaxed))
    return;
  lock(&s->lock);
  records_reclaim(s);
  size_t step = 1;
  while (s->oldest) {
    record_t *ahead = s->oldest;
    for (size_t i = 1; (i < step || ahead->captured) && ahead->newer; i++)
      ahead = ahead->newer;
    if (record_is_done(ahead)) {
      records_complete(s, ahead->number);
      step *= 2;
    } else if (ahead->captured && ahead->newer) {
      continue; /* a later event stands for this one */
    } else if (step > 1 && ahead != s->oldest) {
      step = 1; /* too far ahead: begin again with the oldest */
    } else {
      break;
    }
  }
  s->ask_at = s->outstanding + ASK_AT;
  if (!s->oldest && s->listed) {
    s->listed = false;
    atomic_fetch_and(&s->group->listed, ~group_bit(s));
  }
  unlock(&s->lock);
}

void stream_retire_all(core_t *core)
{
  for (stream_group_t *group = atomic_load(&core->stream_groups); group; group = group->older)
    for (uint64_t left = atomic_load(&group->listed); left; left &= left - 1)
      stream_retire(group->stream[__builtin_ctzll(left)]);
}

bool stream_completes_now(stream_t *s, uint64_t number)
{
  enum { QUESTIONS = 256 }; /* together they take longer than an event on an idle stream */
  for (int i = 0; i < QUESTIONS && !stream_completed(s, number); i++)
    stream_retire(s);
  return stream_completed(s, number);
}

void stream_declare_completed(stream_t *s, uint64_t number)
{
  lock(&s->lock);
  records_reclaim(s);
  records_complete(s, number);
  unlock(&s->lock);
}

uint64_t stream_pass(stream_t *s)
{
  lock(&s->lock);
  uint64_t number = atomic_fetch_add(&s->last, 1) + 1;
  unlock(&s->lock);
  return number;
}

void stream_sync_begin(stream_t *s)
{
  s->syncing = stream_pass(s);
}

void stream_sync_done(stream_t *s)
{
  stream_declare_completed(s, s->syncing);
}

/* ---- positions that nobody has asked about ---------------------------------- */

void probes_add(probes_t *probes, stream_t *stream, uint64_t stamp)
{
  int i = 0;
  while (i < probes->count && probes->stream[i] != stream)
    i++;
  if (i == PROBES)
    return;
  if (i == probes->count) {
    probes->stream[probes->count++] = stream;
    probes->stamp[i] = 0;
  }
  if (probes->stamp[i] < stamp)
    probes->stamp[i] = stamp;
}

void probes_ask(const probes_t *probes, core_t *core, bool patient)
{
  record_t *record[PROBES];
  for (int i = 0; i < probes->count; i++)
    record[i] = stream_probe(probes->stream[i], probes->stamp[i]);
  for (int i = 0; i < probes->count; i++) {
    if (record[i] && patient) /* until one is busy: the others had that moment, too */
      patient = stream_completes_now(probes->stream[i], record[i]->number);
    if (record[i])
      record_drop(record[i]);
  }
  if (probes->count)
    stream_retire_all(core);
}
