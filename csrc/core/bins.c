#include "bins.h"

#include "types.h"

unsigned bins_index(size_t size)
{
  /* No branch: which sizes follow each other cannot be foretold. */
  size_t unit = size / BLOCK_ALIGN;
  unsigned shift = 58u - (unsigned)__builtin_clzll(unit | BINS_PER_DOUBLING);
  return shift * BINS_PER_DOUBLING + (unsigned)(unit >> shift);
}

/* Best-fit order. */
static bool block_before(const block_t *a, const block_t *b)
{
  if (a->size != b->size)
    return a->size < b->size;
  if (a->segment != b->segment)
    return a->segment->sequence < b->segment->sequence;
  return a->address < b->address;
}

static uint64_t block_priority(const block_t *block)
{
  return block->address * 0x9e3779b97f4a7c15u;
}

/* `block` (may be NULL) comes to stand where `link` is, below `above`. */
static inline void hang(block_t **link, block_t *above, block_t *block, bool upward)
{
  *link = block;
  if (upward && block)
    block->above = above;
}

/* The bin, which is not empty, gets one more. */
static inline void bin_insert(block_t **root, block_t *block, bool upward)
{
  uint64_t priority = block_priority(block);
  block_t **link = root, *above = NULL;
  while (*link && block_priority(*link) > priority) {
    above = *link;
    link = block_before(block, above) ? &above->left : &above->right;
  }

  /* The subtree found here is split in two around the new root. */
  block_t *rest = *link, *below_less = block, *below_more = block;
  block_t **less = &block->left, **more = &block->right;
  while (rest) {
    if (block_before(rest, block)) {
      hang(less, below_less, rest, upward);
      below_less = rest;
      less = &rest->right;
      rest = *less;
    } else {
      hang(more, below_more, rest, upward);
      below_more = rest;
      more = &rest->left;
      rest = *more;
    }
  }
  *less = *more = NULL;
  hang(link, above, block, upward);
}

void bins_insert(bins_t *bins, block_t *block)
{
  unsigned index = bins_index(block->size);
  block_t **root = &bins->root[index];
  bins->count++;
  if (*root) {
    if (bins->upward)
      bin_insert(root, block, true);
    else
      bin_insert(root, block, false);
    return;
  }
  block->left = block->right = NULL;
  hang(root, NULL, block, bins->upward);
  bins->occupied |= 1ull << index / BINS_PER_DOUBLING;
  bins->occupied_in[index / BINS_PER_DOUBLING] |= 1u << index % BINS_PER_DOUBLING;
}

static inline void bin_remove(block_t **root, block_t *block, bool upward)
{
  block_t **link = root, *above = upward ? block->above : NULL;
  if (above)
    link = above->left == block ? &above->left : &above->right;
  while (*link != block)
    link = block_before(block, *link) ? &(*link)->left : &(*link)->right;

  block_t *less = block->left, *more = block->right;
  while (less && more) {
    if (block_priority(less) > block_priority(more)) {
      hang(link, above, less, upward);
      above = less;
      link = &less->right;
      less = *link;
    } else {
      hang(link, above, more, upward);
      above = more;
      link = &more->left;
      more = *link;
    }
  }
  hang(link, above, less ? less : more, upward);
  block->left = block->right = NULL;
  if (upward)
    block->above = NULL;
}

void bins_remove(bins_t *bins, block_t *block)
{
  unsigned index = bins_index(block->size);
  if (bins->upward)
    bin_remove(&bins->root[index], block, true);
  else
    bin_remove(&bins->root[index], block, false);
  bins->count--;
  if (bins->root[index])
    return;
  uint32_t *in = &bins->occupied_in[index / BINS_PER_DOUBLING];
  *in &= ~(1u << index % BINS_PER_DOUBLING);
  if (!*in)
    bins->occupied &= ~(1ull << index / BINS_PER_DOUBLING);
}

static block_t *leftmost(block_t *root)
{
  while (root && root->left)
    root = root->left;
  return root;
}

/* The first block of the first bin after `index`. */
static block_t *first_after(const bins_t *bins, unsigned index)
{
  unsigned doubling = index / BINS_PER_DOUBLING;
  unsigned bin = index % BINS_PER_DOUBLING;
  uint32_t in = bin == 31 ? 0 : bins->occupied_in[doubling] & ~0u << (bin + 1);
  if (!in) {
    uint64_t higher = bins->occupied & ~1ull << doubling;
    if (!higher)
      return NULL;
    doubling = (unsigned)__builtin_ctzll(higher);
    in = bins->occupied_in[doubling];
  }
  return leftmost(bins->root[doubling * BINS_PER_DOUBLING + (unsigned)__builtin_ctz(in)]);
}

block_t *bins_best_fit(const bins_t *bins, size_t size)
{
  unsigned index = bins_index(size);
  if (index >= BINS_COUNT)
    return NULL;
  block_t *best = NULL;
  for (block_t *b = bins->root[index]; b;) {
    if (b->size >= size) {
      best = b;
      b = b->left;
    } else {
      b = b->right;
    }
  }
  return best ? best : first_after(bins, index);
}

block_t *bins_next(const bins_t *bins, const block_t *block)
{
  unsigned index = bins_index(block->size);
  block_t *next = NULL;
  for (block_t *b = bins->root[index]; b;) {
    if (block_before(block, b)) {
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

static bool tree_is_valid(const bins_t *bins, const block_t *above, const block_t *b,
                          unsigned index, size_t *count)
{
  if (!b)
    return true;
  ++*count;
  return bins_index(b->size) == index && (!bins->upward || b->above == above) &&
         (!b->left || (block_before(b->left, b) &&
                       block_priority(b->left) <= block_priority(b))) &&
         (!b->right || (block_before(b, b->right) &&
                        block_priority(b->right) <= block_priority(b))) &&
         tree_is_valid(bins, b, b->left, index, count) &&
         tree_is_valid(bins, b, b->right, index, count);
}

bool bins_is_valid(const bins_t *bins)
{
  size_t count = 0;
  for (unsigned i = 0; i < BINS_COUNT; i++) {
    bool bit = bins->occupied_in[i / BINS_PER_DOUBLING] >> i % BINS_PER_DOUBLING & 1;
    if (bit != (bins->root[i] != NULL) || !tree_is_valid(bins, NULL, bins->root[i], i, &count))
      return false;
  }
  for (unsigned d = 0; d < BINS_DOUBLINGS; d++)
    if ((bins->occupied >> d & 1) != (bins->occupied_in[d] != 0))
      return false;
  return count == bins->count;
}
