/* Marks: record_use, record_stream and related calls. */
#include "core/base/types.h"
#include "one_world.h"

BEGIN(WHEN_TOLD)

SCENE(any_address_inside_will_do_and_foreign_ones_are_skipped)
{
  char *a = world_malloc(&w, 12 * MIB, r), *b = world_malloc(&w, 12 * MIB, r);
  const void *p[5] = {a + 12 * MIB - 1, &w, NULL, b, a + 513};
  size_t marked = 0;
  CHECK_OK(esper_record_use(w.core, p, 5, s, 0, &marked));
  CHECK_EQ(marked, 3);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 2);
  world_free(&w, a);
  CHECK_OK(esper_record_use(w.core, p, 1, s, 0, &marked)); /* freed */
  CHECK_EQ(marked, 0);
  CHECK_OK(esper_record_use(w.core, NULL, 0, s, 0, &marked));
  CHECK_EQ(marked, 0);
}
