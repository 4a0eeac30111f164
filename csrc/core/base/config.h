/* config.h: the configuration, and the sizes that follow from it: of blocks, of segments, and of
 * the rest that makes a split worthwhile. */
#ifndef ESPER_CONFIG_H
#define ESPER_CONFIG_H

#include "core.h"

/* Immutable. A new one is put first in the list; older ones stay for threads that still read
 * them. */
typedef struct config {
  esper_config as_given;
  size_t max_split_size; /* SIZE_MAX: unlimited */
  size_t max_non_split_rounding;
  size_t large_segment_size;
  struct config *older;
} config_t;

esper_status config_set(core_t *core, const esper_config *given);
void config_destroy_all(core_t *core);

static inline const config_t *config_of(const core_t *core)
{
  return atomic_load_explicit(&core->config, memory_order_acquire);
}

/* Tells the user, unless he was told: *told says so. The caller holds no lock. */
void config_warn_once(core_t *core, atomic_bool *told, const char *text);

/* The size of the block that a request gets. 0: too large to round. */
size_t config_round(const config_t *config, size_t size);

/* The size class of a block. Small and large blocks lie in different segments. */
bool config_is_large(size_t size);

/* The size of a new segment for a block of `size` bytes. */
size_t config_segment_size(const config_t *config, size_t size);

/* Whether a block of `have` bytes may serve a request for `size`. Oversize blocks (max_split_size
 * and more) serve only requests of about their size. */
bool config_fits(const config_t *config, size_t have, size_t size);

/* Whether the rest of a block becomes a block of its own. A `coarse` block keeps a small rest. */
bool config_splits(const config_t *config, size_t have, size_t size, bool coarse);

static inline bool config_is_oversize(const config_t *config, size_t size)
{
  return size >= config->max_split_size;
}

#endif
