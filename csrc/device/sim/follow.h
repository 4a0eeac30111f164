/* follow.h: who else may use what a stream is given. */
#ifndef ESPER_SIM_FOLLOW_H
#define ESPER_SIM_FOLLOW_H

#include "accesses.h"

typedef struct sim_follower {
  const sim_stream *stream;
  const sim_event *event; /* whoever waits for it; neither: a stream that is yet to be made */
} sim_follower;

/* Nonzero: some follower may start before the mark is over. The mark must be ordered before the
 * stream's own future. */
int sim_follower_lacks(sim *s, const sim_mark *mark, const sim_stream *stream,
                       sim_follower *follower);
void sim_report_follower(sim *s, const sim_follower *follower);

#endif
