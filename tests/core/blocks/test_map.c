#include "core/blocks/map.h"

#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "core/blocks/block.h"

enum { MANY = 5000, SEGMENTS = 200 };

static block_t blocks[MANY];
static segment_t segments[SEGMENTS];

static uintptr_t address_of(int i)
{
  return 0x700000000000 + (uintptr_t)i * 1536;
}

TEST(blocks_are_found_by_their_address)
{
  map_t *map = map_create();
  CHECK(!map_find(map, address_of(0)));
  for (int i = 0; i < MANY; i++) {
    blocks[i] = (block_t){.address = address_of(i)};
    map_insert(map, &blocks[i]);
  }
  CHECK(map_is_valid(map)); /* it has grown several times */
  for (int i = 0; i < MANY; i++) {
    CHECK(map_find(map, address_of(i)) == &blocks[i]);
    CHECK(!map_find(map, address_of(i) + 512));
  }
  for (int i = 0; i < MANY; i += 2)
    map_remove(map, &blocks[i]);
  for (int i = 0; i < MANY; i++)
    CHECK(map_find(map, address_of(i)) == (i % 2 ? &blocks[i] : NULL));
  CHECK(map_is_valid(map));
  CHECK(map_bytes(map) > MANY * sizeof(void *));
  map_destroy(map);
}

TEST(segments_are_found_around_an_address)
{
  map_t *map = map_create();
  for (int i = 0; i < SEGMENTS; i++) {
    int k = i * 7 % SEGMENTS; /* in no order */
    segments[k] = (segment_t){.address = 0x1000000 + (uintptr_t)k * 0x10000, .size = 0x8000};
    CHECK(map_insert_segment(map, &segments[k]));
  }
  CHECK(map_is_valid(map));
  CHECK(!map_find_segment(map, 0x1000000 - 1));
  for (int k = 0; k < SEGMENTS; k++) {
    uintptr_t a = segments[k].address;
    CHECK(map_find_segment(map, a) == &segments[k]);
    CHECK(map_find_segment(map, a + 0x7fff) == &segments[k]);
    CHECK(!map_find_segment(map, a + 0x8000));
  }
  for (int k = 0; k < SEGMENTS; k += 3)
    map_remove_segment(map, &segments[k]);
  for (int k = 0; k < SEGMENTS; k++)
    CHECK(map_find_segment(map, segments[k].address + 5) == (k % 3 ? &segments[k] : NULL));
  map_destroy(map);
}

/* It may have to be put back when the driver does not take it. */
TEST(a_segment_that_was_removed_keeps_its_room)
{
  enum { FULL = 64 };
  map_t *map = map_create();
  for (int k = 0; k <= FULL; k++)
    segments[k] = (segment_t){.address = 0x1000000 + (uintptr_t)k * 0x10000, .size = 0x8000};
  for (int k = 0; k < FULL; k++)
    CHECK(map_insert_segment(map, &segments[k]));
  map_remove_segment(map, &segments[5]);
  check_limit_malloc(0);
  CHECK(!map_insert_segment(map, &segments[FULL]));
  map_insert_reserved(map, &segments[5]);
  CHECK(map_find_segment(map, segments[5].address) == &segments[5]);
  map_remove_segment(map, &segments[5]);
  map_unreserve_segment(map);
  CHECK(map_insert_segment(map, &segments[FULL]));
  check_limit_malloc(-1);
  CHECK(map_is_valid(map));
  CHECK(map_find_segment(map, segments[FULL].address) == &segments[FULL]);
  map_destroy(map);
}

static map_t *shared;
static atomic_bool stop;

static void *read_on(void *unused)
{
  (void)unused;
  while (!atomic_load(&stop)) {
    for (int i = 1; i < MANY; i += 2)
      CHECK(map_find(shared, address_of(i)) == &blocks[i]);
    CHECK(map_bytes(shared) > MANY / 2 * sizeof(void *)); /* by whoever reads figures */
  }
  return NULL;
}

/* Half of the blocks come and go, the table grows; the rest are always found. */
TEST(readers_need_no_lock)
{
  shared = map_create();
  atomic_store(&stop, false);
  for (int i = 1; i < MANY; i += 2) {
    blocks[i] = (block_t){.address = address_of(i)};
    if (i < 1000)
      map_insert(shared, &blocks[i]);
  }
  for (int i = 1001; i < MANY; i += 2)
    map_insert(shared, &blocks[i]);
  pthread_t reader[2];
  for (int i = 0; i < 2; i++)
    pthread_create(&reader[i], NULL, read_on, NULL);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < MANY; i += 2) {
      __atomic_store_n(&blocks[i].address, address_of(i), __ATOMIC_RELAXED);
      map_insert(shared, &blocks[i]);
    }
    for (int i = 0; i < MANY; i += 2)
      map_remove(shared, &blocks[i]);
  }
  atomic_store(&stop, true);
  for (int i = 0; i < 2; i++)
    pthread_join(reader[i], NULL);
  CHECK(map_is_valid(shared));
  map_destroy(shared);
}
