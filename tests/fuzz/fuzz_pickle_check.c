/* fuzz_pickle_check.c: whatever the bytes are, the check of a pickle
 *
 * - reads none beyond them (the sanitizers watch),
 * - admits only what a second reading (graph.h) finds whole, without circles,
 *   and within the limits,
 * - refuses as damaged, too deep or a key too large only what that reading finds
 *   to be so, and at the same byte. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "graph.h"
#include "pickle/check.h"
#include "pickle/limits.h"

/* A build with a lower limit shows that the comparison is able to fail. */
#ifndef DEPTH_ALLOWED
#define DEPTH_ALLOWED PICKLE_DEPTH_LIMIT
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int holds, const char *what)
{
  if (!holds) {
    fprintf(stderr, "pickle_check: not so: %s\n", what);
    abort();
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  pickle_verdict v = pickle_check(data, size, UINT64_MAX);
  require(v.at <= size, "the byte that is wrong lies in the file");
  require(v.cost >= size, "loading takes as much as the file");

  if (size > GRAPH_BYTES)
    return 0;
  if (v.found == PICKLE_PLAIN) {
    graph_facts facts = graph_read(data, size, size);
    require(facts.end == GRAPH_STOPPED && facts.at == v.at, "what is admitted can be loaded");
    require(!facts.circular, "nothing that is admitted contains itself");
    require(facts.depth <= DEPTH_ALLOWED, "what is admitted is nested within the limit");
    require(facts.key_size <= PICKLE_KEY_LIMIT, "keys that are admitted are within the limit");
    require(pickle_check(data, size, v.cost).found == PICKLE_PLAIN, "its cost is admitted");
    require(pickle_check(data, size, v.cost - 1).found == PICKLE_COSTLY, "a lower one is not");
    return 0;
  }
  if (v.found == PICKLE_TRUNCATED || v.found == PICKLE_NOT_PLAIN)
    return 0;
  graph_facts facts = graph_read(data, size, v.at);
  require(facts.at == v.at, "what stands before the byte that is wrong can be loaded");
  if (v.found == PICKLE_DAMAGED) {
    require(facts.end == GRAPH_IMPOSSIBLE, "what is called damaged cannot be loaded");
    return 0;
  }
  require(facts.end == GRAPH_PAUSED, "what is refused for its shape could be loaded");
  if (v.found == PICKLE_TOO_DEEP)
    require(facts.depth == PICKLE_DEPTH_LIMIT + 1, "what is too deep is one level too deep");
  else if (v.found == PICKLE_HUGE_KEY)
    require(facts.key_size > PICKLE_KEY_LIMIT, "a key that is too large is so");
  else
    require(v.found == PICKLE_CIRCULAR, "there is no other verdict");
  return 0;
}
