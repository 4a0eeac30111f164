/* The hash table, against an array. */
#include "audit/table.h"

#include "check.h"

enum { KEYS = 300 };

TEST(it_has_what_was_put_and_not_removed)
{
  table t = {0};
  int values[KEYS];
  void *expected[KEYS] = {0};
  uint32_t x = 1;
  size_t count = 0;
  CHECK(!table_get(&t, 7) && !table_remove(&t, 7));
  for (int step = 0; step < 200000; step++) {
    x = x * 1664525u + 1013904223u;
    const size_t key = (x >> 8) % KEYS;
    const uint64_t name = key * 4096; /* like addresses */
    CHECK(table_get(&t, name) == expected[key]);
    if (x >> 31) {
      CHECK(table_put(&t, name, &values[step % KEYS]));
      count += !expected[key];
      expected[key] = &values[step % KEYS];
    } else {
      CHECK(table_remove(&t, name) == expected[key]);
      count -= expected[key] != NULL;
      expected[key] = NULL;
    }
    CHECK_EQ(t.count, count);
  }
  table_clear(&t);
  CHECK(!table_get(&t, 0));
}
