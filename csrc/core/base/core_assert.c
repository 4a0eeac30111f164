#include "core_assert.h"

#include <stdio.h>
#include <stdlib.h>

void core_assert_failed(const char *what, const char *file, int line)
{
  fprintf(stderr, "esper_alloc: internal error: %s does not hold (%s:%d)\n", what, file, line);
  abort();
}
