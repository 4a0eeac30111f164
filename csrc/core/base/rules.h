/* rules.h: the lifetime rules (docs/rules.md), each with a switch.
 *
 * In the build that tests use (-DESPER_RULE_SWITCHES) a set bit in esper_rules_off turns a rule
 * off, to show that some test notices. In every other build RULE(x) is the constant 1. */
#ifndef ESPER_RULES_H
#define ESPER_RULES_H

/* R(name, number in docs/rules.md, the rule in one sentence) */
#define ESPER_RULES(R)                                                                             \
  R(NUMBER_WITH_RECORD, "1", "a number is taken and its event recorded in one step")               \
  R(NEVER_WAITS, "2", "no stream is made to wait for what memory owes")                            \
  R(STAMP_IS_NEXT, "3", "only an event recorded after the free covers owner order")                \
  R(CACHE_STAMPS, "3b", "a free without the lock stamps its block, too")                           \
  R(LATE_WAITS_COUNT, "3c",                                                                        \
    "other streams get memory only after all streams' work before the free")                       \
  R(SPLIT_KEEPS_USES, "4a", "the rest of a split block owes what the block owed")                  \
  R(MERGE_UNITES_USES, "4b", "a merged block owes what both parts owed")                           \
  R(MERGE_TAKES_LATER_STAMP, "4c", "a merged block has the later stamp")                           \
  R(LOAN_MAKES_USE, "4d", "a lent block has a use by all streams, which ends at the free")         \
  R(LOAN_NEEDS_COMPLETION, "4e", "another stream gets only memory that has completed")             \
  R(RELEASE_NEEDS_COMPLETION, "4f", "memory goes back only when all that it owes has completed")   \
  R(MARK_FROM_ANY_DEVICE, "4g", "a mark on a stream of another device adds a use, too")            \
  R(CHECKPOINT_KEEPS_USES, "4h", "restoring a checkpoint drops no obligation")                     \
  R(UNMAP_NEEDS_COMPLETION, "4i", "pages are unmapped only when their block owes nothing")         \
  R(MOVED_PAGES_NEED_COMPLETION, "4j",                                                             \
    "another stream gets pages only of a block that owes nothing")                                 \
  R(MOVED_PAGES_KEEP_STAMP, "4k", "pages that move within a heap still owe what they owed")        \
  R(CACHE_OWES_NOTHING, "4l", "a block that owes a use does not enter the block cache")            \
  R(ONE_USE_A_STREAM, "5a", "a block has at most one use for each stream")                         \
  R(LATER_USE_REPLACES, "5b", "the later use on a stream replaces the earlier")                    \
  R(COMPLETED_USES_LEAVE, "5c", "a use that has completed is dropped")                             \
  R(MARK_LASTS_UNTIL_FREE, "5d", "a mark until the free has its event made at the free")           \
  R(EVENTS_IMMUTABLE, "6a", "an event is not recorded again while a use refers to it")             \
  R(FAILED_QUERY_HOLDS, "6b", "a failed query satisfies nothing")                                  \
  R(CAPTURE_RECORDS_NOTHING, "7a", "on a capturing stream no event is recorded")                   \
  R(CAPTURE_KEEPS_APART, "7b", "queue order counts only within one capture")                       \
  R(QUIESCE_NEEDS_COMPLETION, "7c", "a capture gets from its pool only what has completed")        \
  R(QUIESCE_BEFORE_REUSE, "7d", "what is freed outside the capture waits for the next quiesce")    \
  R(GRAPHS_KEEP_MEMORY, "7e", "memory that a graph may touch is not given back")                   \
  R(MARK_DESPITE_CAPTURES, "7f", "a mark works while another stream is being captured")            \
  R(CAPTURED_USE_HOLDS, "7g", "in a capture a use holds its block until its point comes before")   \
  R(OUTSIDE_STAYS_OUTSIDE, "7h", "nothing in a capture satisfies what is owed to work outside")    \
  R(BODY_KEEPS_APART, "7i", "a block that is freed while another graph is captured waits")         \
  R(GRAPH_READS_ANYWHERE, "7j", "a note in a capture of memory from outside is on all streams")    \
  R(UNRECORDED_HOLDS, "9a", "a use that cannot be recorded holds its block")                       \
  R(MORTAL_HANDLES, "9b", "a mortal stream's handle serves only the call that presents it")        \
  R(ENDED_OWES_NOTHING, "9c", "an ended stream's entry serves again only if nothing refers to it") \
  R(UNSEEN_USES_COUNT, "9d", "what is live when an observer begins is used on all streams")        \
  R(WAITS_END, "10a", "a wait of the host ends when nothing completes")                            \
  R(WAITS_IN_VAIN_ARE_RARE, "10b", "after waits in vain the host rests")                           \
  R(SLEEP_NEEDS_COMPLETION, "11a", "pages go to sleep only when all work before has completed")    \
  R(SLEEP_KEEPS_GRAPHS, "11b", "free memory that a graph may read keeps its contents, too")        \
  R(UNMAP_AFTER_COPY, "11c", "a page that sleeps is unmapped only when its copy has completed")    \
  R(WAKE_BEFORE_USE, "11d", "whoever wakes memory returns when its contents are back")             \
  R(ASLEEP_SERVES_NOTHING, "11e", "memory on pages that sleep is not handed out")                  \
  R(FENCED_SERVES_ONCE, "12a", "memory with a fence is handed out once")                           \
  R(FENCE_NEEDS_COMPLETION, "12b", "a fence is unmapped only when its block owes nothing")         \
  R(FENCE_ADDRESSES_ONCE, "12c", "addresses of a fence serve again after all others have")

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
