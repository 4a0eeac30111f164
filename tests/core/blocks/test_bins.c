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

TEST(random_operations_agree_with_a_list_where_blocks_know_their_place)
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
