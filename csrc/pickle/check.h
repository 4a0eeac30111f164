/* check.h: checks that a pickle has nothing but plain data, is not nested too deep for Python, and
 * does not cost too much to load.
 *
 * A pickle is a program. Before a snapshot is loaded, this check makes sure that the program is
 * complete, builds only containers and scalars, and cannot make the loader allocate far more than
 * its size suggests. Memo indices must grow one by one, because the loader's memo is an array as
 * long as its highest index. The cost of everything built is added up. */
#ifndef ESPER_PICKLE_CHECK_H
#define ESPER_PICKLE_CHECK_H

#include <stddef.h>
#include <stdint.h>

typedef enum pickle_finding {
  PICKLE_PLAIN,
  PICKLE_COSTLY, /* loading it would cost more than the limit */
  PICKLE_TRUNCATED,
  PICKLE_DAMAGED, /* or not a pickle at all */
  PICKLE_NOT_PLAIN,
  PICKLE_TOO_DEEP,
  PICKLE_CIRCULAR,
  PICKLE_HUGE_KEY,
  PICKLE_NO_MEMORY
} pickle_finding;

typedef struct pickle_verdict {
  pickle_finding found;
  size_t at;       /* position of the wrong byte */
  const char *why; /* for DAMAGED and NOT_PLAIN: what that byte does */
  uint64_t cost;   /* approximate bytes that loading takes */
} pickle_verdict;

/* Reads to the pickle's end, or until the cost exceeds cost_limit. The check itself needs a few
 * bytes for each value on the loader's stack and in its memo and for each container, not more than
 * the cost counts for them. */
pickle_verdict pickle_check(const unsigned char *data, size_t size, uint64_t cost_limit);

#endif
