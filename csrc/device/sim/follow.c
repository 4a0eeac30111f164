/* follow.c: who else may use what a stream is given: its followers, which the program has ordered
 * after all the work that it gave the stream.
 *
 * A follower comes after everything that the stream came after when the program last gave it work.
 * So it can come too early only if the core made the stream wait since then: the follower does not
 * have that wait. In a capture the core can add neither nodes nor edges. */
#include "follow.h"

#include "base.h"
#include "clock.h"

static int follows(const sim_stream *stream, const sim_clock *by_program)
{
  return sim_clock_get(by_program, stream->slot) >= stream->given;
}

static int lacks_outside(sim *s, const sim_mark *mark, const sim_stream *stream,
                         sim_follower *follower)
{
  int all_known = follows(stream, &s->host);
  for (uint32_t i = 0; i < s->stream_count; i++) {
    const sim_stream *other = s->streams[i];
    sim_future future = {.clock = &other->clock};
    if (other == stream || !other->alive || other->of_core ||
        (!all_known && !follows(stream, &other->by_program)) ||
        sim_mark_is_before_future(s, mark, &future))
      continue;
    follower->stream = other;
    return 1;
  }
  for (uint32_t i = 0; !all_known && i < s->event_count; i++) {
    const sim_event *event = s->events[i];
    sim_future future = {.clock = &event->clock};
    if (!event->alive || event->capture || !follows(stream, &event->by_program) ||
        sim_mark_is_before_future(s, mark, &future))
      continue;
    follower->event = event;
    return 1;
  }
  return all_known;
}

int sim_follower_lacks(sim *s, const sim_mark *mark, const sim_stream *stream,
                       sim_follower *follower)
{
  if (stream->capture || !stream->core_waited)
    return 0;
  sim_future before_wait = {.clock = &stream->before_wait};
  return !sim_mark_is_before_future(s, mark, &before_wait) &&
         lacks_outside(s, mark, stream, follower);
}

void sim_report_follower(sim *s, const sim_follower *follower)
{
  sim_report(s, "\n  and may be used at once on ");
  if (follower->stream)
    sim_report_stream(s, follower->stream);
  else if (follower->event)
    sim_report(s, "a stream that waits for an event of device %d", follower->event->device);
  else
    sim_report(s, "a stream that is yet to be made");
  sim_report(s, ", which comes after all that the program gave the first,");
}
