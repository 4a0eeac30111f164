/* check.h: whether a pickle holds nothing but plain data, nested no deeper than
 * Python can bear, and what loading it takes.
 *
 * A pickle is a program. Before a snapshot is loaded, this pass makes sure that
 * its program can only build containers and scalars, that it is whole, and that
 * it cannot make the loader allocate out of proportion: memo indexes must have
 * been reached one by one (the loader's memo is an array as long as its highest
 * index), and the cost of what is built is added up. */
#ifndef ESPER_PICKLE_CHECK_H
#define ESPER_PICKLE_CHECK_H

#include <stddef.h>
#include <stdint.h>

typedef enum pickle_finding {
  PICKLE_PLAIN,
  PICKLE_COSTLY, /* loading it would take more than the limit */
  PICKLE_TRUNCATED,
  PICKLE_DAMAGED, /* or no pickle at all */
  PICKLE_NOT_PLAIN,
  PICKLE_TOO_DEEP,
  PICKLE_CIRCULAR,
  PICKLE_HUGE_KEY,
  PICKLE_NO_MEMORY
} pickle_finding;

typedef struct pickle_verdict {
  pickle_finding found;
  size_t at;       /* the byte that is wrong */
  const char *why; /* what that byte does, where DAMAGED or NOT_PLAIN */
  uint64_t cost;   /* bytes that loading takes, roughly */
} pickle_verdict;

/* Reads up to the pickle's end, or until the cost exceeds cost_limit. Of its own
 * it takes some bytes for each value on the loader's stack and in its memo, and
 * for each container: about as many as the cost counts for them, or fewer. */
pickle_verdict pickle_check(const unsigned char *data, size_t size, uint64_t cost_limit);

#endif
