/* order.h: streams, their branches in captures, events and the host. */
#ifndef ESPER_AUDIT_ORDER_H
#define ESPER_AUDIT_ORDER_H

#include "state.h"

/* Made when it is first named. NULL: no host memory. */
stream *order_stream(audit *a, audit_stream name);
/* Where the stream's work goes now, ordered after what the host has waited for. */
lane *order_lane(audit *a, stream *s);
lane *order_outside(audit *a, stream *s); /* whether it is in a capture or not */
/* The stream's lane that has the slot. NULL: its capture is over. */
lane *order_lane_with(audit *a, stream *s, uint32_t slot);

/* Whether the lane's future comes after that work. */
static inline int order_covers(const lane *l, uint32_t slot, uint64_t epoch)
{
  return l->slot == slot || clock_get(&l->after, slot) >= epoch;
}

/* Lets the stream take part in the capture, or no more. */
void order_join_capture(audit *a, stream *s, capture *c);
void order_leave_capture(audit *a, stream *s);

/* Frees it, and all that could still become a finding. */
void order_drop_hazards(audit *a, lane *l);
void order_destroy(audit *a);

#endif
