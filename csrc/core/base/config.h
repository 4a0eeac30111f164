/* config.h: the sizes that the allocator works with. */
#ifndef ESPER_CONFIG_H
#define ESPER_CONFIG_H

#include "core.h"

/* Immutable: a new one is put in front, older ones stay for those who read. */
typedef struct config {
  esper_config as_given;
  size_t max_split_size; /* SIZE_MAX: unlimited */
  size_t max_non_split_rounding;
  size_t large_segment_size;
  esper_segments segments; /* of pools of which nothing else is known */
  struct config *older;
} config_t;

esper_status config_set(core_t *core, const esper_config *given);
void config_destroy_all(core_t *core);

static inline const config_t *config_of(const core_t *core)
{
  return atomic_load_explicit(&core->config, memory_order_acquire);
}

/* The size of the block that a request gets. 0: too large to round. */
size_t config_round(const config_t *config, size_t size);

/* Size class of a block: large blocks live in segments of their own. */
bool config_is_large(size_t size);

/* The segment to get for a block. */
size_t config_segment_size(const config_t *config, size_t size);

/* Whether a block of `have` bytes may serve a request for `size`: oversize
 * blocks (max_split_size and more) are neither split nor wasted. */
bool config_fits(const config_t *config, size_t have, size_t size);

/* Whether the rest of a block is worth a block of its own; of a `coarse` one a small
 * rest is not. */
bool config_splits(const config_t *config, size_t have, size_t size, bool coarse);

static inline bool config_is_oversize(const config_t *config, size_t size)
{
  return size >= config->max_split_size;
}

#endif
