#include "core/blocks/bins.h"

#include <stdbool.h>

#include "core/base/types.h"
#include "check.h"
#include "core/blocks/block.h"

enum { MANY = 600 };

static bins_t bins;
static segment_t segments[4];
static block_t blocks[MANY];
static bool in[MANY];

static uint64_t seed;
static uint64_t draw(void)
{
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return seed >> 20;
}

static void begin(void)
{
  memset(&bins, 0, sizeof bins);
  memset(blocks, 0, sizeof blocks);
  memset(in, 0, sizeof in);
  for (int i = 0; i < 4; i++)
    segments[i] = (segment_t){.sequence = (uint64_t)i};
  seed = 42;
}

static block_t *make(int i, size_t size, uint64_t segment, uintptr_t address)
{
  blocks[i] = (block_t){.size = size, .segment = &segments[segment], .address = address};
  return &blocks[i];
}

TEST(a_larger_size_has_no_smaller_bin)
{
  unsigned last = 0;
  for (size_t size = 512; size < (size_t)1 << 48; size += 512 + size / 100) {
    size -= size % 512;
    unsigned index = bins_index(size);
    CHECK(index >= last);
    CHECK(index < BINS_COUNT);
    last = index;
  }
  for (size_t size = 512; size <= 16 << 10; size += 512) /* exact */
    CHECK(bins_index(size) != bins_index(size + 512));
  /* A bin is at most 1/32 of its sizes wide. */
  CHECK(bins_index(64 << 20) != bins_index((64 << 20) + (2 << 20)));
}

TEST(the_best_fit_is_the_smallest_that_fits)
{
  begin();
  CHECK(!bins_best_fit(&bins, 512));
  block_t *a = make(0, 4096, 0, 0x10000), *b = make(1, 8192, 0, 0x20000),
          *c = make(2, 1 << 20, 0, 0x100000);
  bins_insert(&bins, c);
  bins_insert(&bins, a);
  bins_insert(&bins, b);
  CHECK(bins_best_fit(&bins, 512) == a);
  CHECK(bins_best_fit(&bins, 4096) == a);
  CHECK(bins_best_fit(&bins, 4608) == b);
  CHECK(bins_best_fit(&bins, 8704) == c);
  CHECK(bins_best_fit(&bins, 1 << 20) == c);
  CHECK(!bins_best_fit(&bins, (1 << 20) + 512));
  CHECK(!bins_best_fit(&bins, SIZE_MAX / 4)); /* has no bin at all */
  CHECK(bins_next(&bins, a) == b && bins_next(&bins, b) == c);
  CHECK(!bins_next(&bins, c));
  CHECK(bins_largest(&bins) == c);
  bins_remove(&bins, a);
  CHECK(bins_best_fit(&bins, 512) == b);
  bins_remove(&bins, b);
  bins_remove(&bins, c);
  CHECK(!bins_largest(&bins) && bins.count == 0);
  CHECK(bins_is_valid(&bins));
}

/* So that addresses repeat from run to run, whatever the driver's are. */
TEST(equal_sizes_come_in_order_of_birth_not_of_address)
{
  begin();
  block_t *young = make(0, 4096, 2, 0x1000000), *old = make(1, 4096, 1, 0x9000000),
          *later = make(2, 4096, 1, 0x9001000);
  bins_insert(&bins, later);
  bins_insert(&bins, young);
  bins_insert(&bins, old);
  CHECK(bins_best_fit(&bins, 4096) == old);
  CHECK(bins_next(&bins, old) == later);
  CHECK(bins_next(&bins, later) == young);
}

static bool before(const block_t *a, const block_t *b)
{
  if (a->size != b->size)
    return a->size < b->size;
  if (a->segment != b->segment)
    return a->segment->sequence < b->segment->sequence;
  return a->address < b->address;
}

/* Against the plainest implementation. */
static void agree_with_a_list(bool placed)
{
  begin();
  bins.placed = placed;
  for (int i = 0; i < MANY; i++) {
    size_t size = 512 * (1 + draw() % (i % 3 ? 100 : 100000));
    make(i, size, draw() % 4, 0x1000000 + (uintptr_t)i * 512);
  }
  for (int round = 0; round < 20000; round++) {
    int i = (int)(draw() % MANY);
    if (in[i])
      bins_remove(&bins, &blocks[i]);
    else
      bins_insert(&bins, &blocks[i]);
    in[i] = !in[i];
    size_t size = 512 * (1 + draw() % 1000);
    const block_t *best = NULL, *largest = NULL;
    for (int k = 0; k < MANY; k++) {
      if (!in[k])
        continue;
      if (blocks[k].size >= size && (!best || before(&blocks[k], best)))
        best = &blocks[k];
      if (!largest || before(largest, &blocks[k]))
        largest = &blocks[k];
    }
    CHECK(bins_best_fit(&bins, size) == best);
    CHECK(bins_largest(&bins) == largest);
    if (round % 1000 == 0) {
      CHECK(bins_is_valid(&bins));
      const block_t *last = NULL;
      size_t count = 0;
      for (block_t *b = bins_best_fit(&bins, 0); b; b = bins_next(&bins, b)) {
        CHECK(!last || before(last, b));
        last = b;
        count++;
      }
      CHECK_EQ(count, bins.count);
    }
  }
}

TEST(random_operations_agree_with_a_list)
{
  agree_with_a_list(false);
}

TEST(random_operations_agree_with_a_list_where_blocks_know_their_link)
{
  agree_with_a_list(true);
}

TEST(a_block_in_the_wrong_bin_is_noticed)
{
  begin();
  block_t *a = make(0, 4096, 0, 0x10000);
  bins_insert(&bins, a);
  a->size = 8192;
  CHECK(!bins_is_valid(&bins));
}
