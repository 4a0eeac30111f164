/* rules.h: the lifetime rules (docs/rules.md), each with a switch.
 *
 * In the build that tests use (-DESPER_RULE_SWITCHES) a set bit in
 * esper_rules_off removes a rule, so that a test can show that somebody would
 * notice. In every other build RULE(x) is the constant 1. */
#ifndef ESPER_RULES_H
#define ESPER_RULES_H

/* R(name, number in docs/rules.md, what it says) */
#define ESPER_RULES(R)                                                                             \
  R(NUMBER_WITH_RECORD, "1a", "a number is taken and its event recorded in one step")              \
  R(CLOCK_AFTER_WAIT, "1b", "the frontier rises only after the wait succeeded")                    \
  R(GATE_RAISES_ONE, "2a", "a gate raises one entry of the frontier")                              \
  R(GATE_IS_REMEMBERED, "2b", "what a stream was made to wait for it does not wait for again")     \
  R(STAMP_IS_NEXT, "3", "owner order is covered only by an event recorded later")                  \
  R(CACHE_STAMPS, "3b", "a free without the lock has its position in owner order, too")            \
  R(SPLIT_KEEPS_USES, "4a", "taking part of a block clears nothing on the rest")                   \
  R(MERGE_UNITES_USES, "4b", "a merged block owes what both parts owed")                           \
  R(MERGE_TAKES_LATER_STAMP, "4c", "a merged block has the later stamp")                           \
  R(LOAN_MAKES_USE, "4d", "the free of a lent block makes the borrower a use")                     \
  R(LOAN_NEEDS_COMPLETION, "4e", "another stream gets only what has completed or is gated")        \
  R(RELEASE_NEEDS_COMPLETION, "4f", "memory leaves only when all it owes has completed")           \
  R(MOVE_NEEDS_COMPLETION, "4g", "a segment changes its home only when all it owes has completed") \
  R(MARK_FROM_ANY_DEVICE, "4h", "a stream of another device is a use like any other")              \
  R(RUN_REST_KEEPS_USES, "4i", "taking a run of blocks clears nothing on the rest")                \
  R(CHECKPOINT_KEEPS_USES, "4j", "putting a checkpoint back clears nothing")                       \
  R(UNMAP_NEEDS_COMPLETION, "4k",                                                                  \
    "pages are unmapped only when all that their block owes has completed")                        \
  R(LENT_PAGES_NEED_COMPLETION, "4l",                                                              \
    "pages are lent to another stream only when all that their block owes has completed")          \
  R(LENT_PAGES_KEEP_STAMP, "4m",                                                                   \
    "pages that are lent owe what they owed, and are stale where they were")                       \
  R(CACHE_OWES_NOTHING, "4n", "what owes a use is not handed out without the lock")                \
  R(ONE_USE_A_STREAM, "5a", "a block has at most one use a stream")                                \
  R(LATER_USE_REPLACES, "5b", "the later use on a stream replaces the earlier")                    \
  R(COMPLETED_USES_LEAVE, "5c", "a use that has completed is dropped")                             \
  R(EVENTS_IMMUTABLE, "6a", "an event is not recorded again while referenced")                     \
  R(FAILED_QUERY_HOLDS, "6b", "a failed query satisfies nothing")                                  \
  R(CAPTURE_RECORDS_NOTHING, "7a", "on a capturing stream no event is recorded")                   \
  R(CAPTURE_KEEPS_APART, "7b", "queue order holds within one capture only")                        \
  R(QUIESCE_NEEDS_COMPLETION, "7c", "a capture gets from its pool only what has completed")        \
  R(QUIESCE_BEFORE_REUSE, "7d",                                                                    \
    "what is freed to a pool outside the capture waits for the next seal")                         \
  R(GRAPHS_KEEP_MEMORY, "7e", "memory that a graph may touch is not given back")                   \
  R(MARK_DESPITE_CAPTURES, "7f", "somebody else's capture takes nothing from a mark")              \
  R(CAPTURED_USE_HOLDS, "7g", "inside a capture a use holds until its nodes come before")          \
  R(CAPTURED_FREE_HAS_POINT, "7h", "inside a capture owner order is a place in the graph")         \
  R(OUTSIDE_STAYS_OUTSIDE, "7i", "nothing inside a capture satisfies what is owed outside")        \
  R(BODY_KEEPS_APART, "7j", "what is freed while another graph is captured has no place")          \
  R(UNRECORDED_HOLDS, "9a", "a use that cannot be recorded holds the block")                       \
  R(MORTAL_HANDLES, "9b", "a mortal stream's handle serves only the call that presents it")        \
  R(ENDED_OWES_NOTHING, "9c", "of a stream that has ended only what owes nothing is used again")   \
  R(GATE_ON_REQUEST, "10a", "a use marked without gate is never gated on")                         \
  R(GATE_NOT_AT_FREE, "10b", "record_stream uses are not gated while memory can grow")             \
  R(RENDEZVOUS_NOT_GATED, "10c", "nobody waits for a stream of rendezvous work")                   \
  R(READY_FIRST, "10d", "no stream waits for a pending block while a ready one serves")            \
  R(OWNER_NOT_GATED_EARLY, "10e", "foreign owner order is not gated while memory can grow")

enum {
#define RULE_ENUM(name, number, says) RULE_##name,
  ESPER_RULES(RULE_ENUM)
#undef RULE_ENUM
      RULE_COUNT
};

#ifdef ESPER_RULE_SWITCHES
extern unsigned long esper_rules_off;
#define RULE(name) (!(esper_rules_off >> RULE_##name & 1ul))
#else
#define RULE(name) 1
#endif

#endif
