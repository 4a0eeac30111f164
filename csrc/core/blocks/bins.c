#include "bins.h"

#include "../base/types.h"
#include "block.h"

unsigned bins_index(size_t size)
{
  /* Without a branch, because sizes are unpredictable. */
  size_t unit = size / BLOCK_ALIGN;
  unsigned shift = 58u - (unsigned)__builtin_clzll(unit | BINS_PER_DOUBLING);
  return shift * BINS_PER_DOUBLING + (unsigned)(unit >> shift);
}

static inline uint64_t birth_of(const block_t *block, bool placed)
{
  return placed ? block->birth : block->segment->sequence;
}

/* Best-fit order. */
static inline bool block_before(const block_t *a, const block_t *b, bool placed)
{
  if (a->size != b->size)
    return a->size < b->size;
  uint64_t first = birth_of(a, placed), second = birth_of(b, placed);
  return first != second ? first < second : a->address < b->address;
}

static uint64_t block_priority(const block_t *block)
{
  /* With a single multiplication, priorities would rise steadily along blocks at certain equal
   * distances, and the tree would become a list. */
  uint64_t x = block->address * 0x9e3779b97f4a7c15u;
  return (x ^ x >> 32) * 0x9e3779b97f4a7c15u;
}

/* Makes `link` point to `block`, which may be NULL. */
static inline void hang(block_t **link, block_t *block, bool placed)
{
  *link = block;
  if (placed && block)
    block->place = link;
}

static inline void insert(block_t **root, block_t *block, bool placed)
{
  if (placed)
    block->birth = block->segment->sequence;
  uint64_t priority = block_priority(block);
  block_t **link = root;
  while (*link && block_priority(*link) > priority)
    link = block_before(block, *link, placed) ? &(*link)->left : &(*link)->right;

  /* The subtree found here is split in two around the new root. */
  block_t *rest = *link, **less = &block->left, **more = &block->right;
  while (rest) {
    if (block_before(rest, block, placed)) {
      hang(less, rest, placed);
      less = &rest->right;
      rest = *less;
    } else {
      hang(more, rest, placed);
      more = &rest->left;
      rest = *more;
    }
  }
  *less = *more = NULL;
  hang(link, block, placed);
}

void bins_insert(bins_t *bins, block_t *block)
{
  unsigned index = bins_index(block->size);
  if (bins->placed)
    insert(&bins->root[index], block, true);
  else
    insert(&bins->root[index], block, false);
  bins->occupied |= 1ull << index / BINS_PER_DOUBLING;
  bins->occupied_in[index / BINS_PER_DOUBLING] |= 1u << index % BINS_PER_DOUBLING;
  bins->count++;
}

static block_t **place_of(bins_t *bins, const block_t *block)
{
  block_t **link = &bins->root[bins_index(block->size)];
  while (*link != block)
    link = block_before(block, *link, false) ? &(*link)->left : &(*link)->right;
  return link;
}

static inline void take_out(block_t **link, block_t *block, bool placed)
{
  block_t *less = block->left, *more = block->right;
  while (less && more) {
    if (block_priority(less) > block_priority(more)) {
      hang(link, less, placed);
      link = &less->right;
      less = *link;
    } else {
      hang(link, more, placed);
      link = &more->left;
      more = *link;
    }
  }
  hang(link, less ? less : more, placed);
  block->left = block->right = NULL;
  if (placed) {
    block->place = NULL;
    block->newer = NULL;
  }
}

void bins_remove(bins_t *bins, block_t *block)
{
  unsigned index = bins_index(block->size);
  if (bins->placed)
    take_out(block->place, block, true);
  else
    take_out(place_of(bins, block), block, false);
  bins->count--;
  /* Without a branch, because nothing predicts whether it was the last block of its bin. */
  unsigned doubling = index / BINS_PER_DOUBLING;
  bins->occupied_in[doubling] &= ~((uint32_t)!bins->root[index] << index % BINS_PER_DOUBLING);
  bins->occupied &= ~((uint64_t)!bins->occupied_in[doubling] << doubling);
}

static block_t *leftmost(block_t *root)
{
  while (root && root->left)
    root = root->left;
  return root;
}

/* The root of the first occupied bin from `index` on, or NULL. */
static inline block_t *root_from(const bins_t *bins, unsigned index)
{
  unsigned doubling = index / BINS_PER_DOUBLING;
  if (doubling >= BINS_DOUBLINGS)
    return NULL;
  uint32_t in = bins->occupied_in[doubling] & ~0u << index % BINS_PER_DOUBLING;
  if (!in) {
    uint64_t higher = bins->occupied & ~1ull << doubling;
    if (!higher)
      return NULL;
    doubling = (unsigned)__builtin_ctzll(higher);
    in = bins->occupied_in[doubling];
  }
  return bins->root[doubling * BINS_PER_DOUBLING + (unsigned)__builtin_ctz(in)];
}

/* The first block of the first occupied bin after `index`, or NULL. */
static block_t *first_after(const bins_t *bins, unsigned index)
{
  return leftmost(root_from(bins, index + 1));
}

block_t *bins_best_fit(const bins_t *bins, size_t size)
{
  unsigned index = bins_index(size);
  block_t *root = root_from(bins, index), *best = NULL;
  for (block_t *b = root; b;) {
    if (b->size >= size) {
      best = b;
      b = b->left;
    } else {
      b = b->right;
    }
  }
  return best || !root ? best : first_after(bins, index);
}

block_t *bins_next(const bins_t *bins, const block_t *block)
{
  unsigned index = bins_index(block->size);
  block_t *next = NULL;
  for (block_t *b = bins->root[index]; b;) {
    if (block_before(block, b, bins->placed)) {
      next = b;
      b = b->left;
    } else {
      b = b->right;
    }
  }
  return next ? next : first_after(bins, index);
}

block_t *bins_largest(const bins_t *bins)
{
  if (!bins->occupied)
    return NULL;
  unsigned doubling = 63u - (unsigned)__builtin_clzll(bins->occupied);
  unsigned bin = 31u - (unsigned)__builtin_clz(bins->occupied_in[doubling]);
  block_t *b = bins->root[doubling * BINS_PER_DOUBLING + bin];
  while (b->right)
    b = b->right;
  return b;
}

static bool tree_is_valid(const bins_t *bins, block_t *const *place, unsigned index, size_t *count)
{
  const block_t *b = *place;
  if (!b)
    return true;
  ++*count;
  return bins_index(b->size) == index &&
         (!bins->placed || (b->place == place && b->birth == b->segment->sequence)) &&
         (!b->left || (block_before(b->left, b, bins->placed) &&
                       block_priority(b->left) <= block_priority(b))) &&
         (!b->right || (block_before(b, b->right, bins->placed) &&
                        block_priority(b->right) <= block_priority(b))) &&
         tree_is_valid(bins, &b->left, index, count) &&
         tree_is_valid(bins, &b->right, index, count);
}

bool bins_is_valid(const bins_t *bins)
{
  size_t count = 0;
  for (unsigned i = 0; i < BINS_COUNT; i++) {
    bool bit = bins->occupied_in[i / BINS_PER_DOUBLING] >> i % BINS_PER_DOUBLING & 1;
    if (bit != (bins->root[i] != NULL) || !tree_is_valid(bins, &bins->root[i], i, &count))
      return false;
  }
  for (unsigned d = 0; d < BINS_DOUBLINGS; d++)
    if ((bins->occupied >> d & 1) != (bins->occupied_in[d] != 0))
      return false;
  return count == bins->count;
}
