#include "config.h"

#include <stdlib.h>

#include "error.h"

/* These sizes are those of PyTorch's own allocator, which users know. Only LARGE_REST differs: it
 * is 1 MiB there, and replayed jobs reserve as much or less with a quarter of that. */
static const size_t SMALL_MOST = 1 * MIB; /* larger blocks are large */
static const size_t SMALL_SEGMENT = 2 * MIB;
static const size_t LARGE_SHARED_MOST = 10 * MIB; /* smaller blocks share a segment */
static const size_t LARGE_SEGMENT = 20 * MIB;
static const size_t SEGMENT_ALIGN = 2 * MIB;
static const size_t LARGE_REST = 256 * KIB; /* a smaller rest stays in the block */

static size_t round_up(size_t size, size_t multiple)
{
  return (size + multiple - 1) / multiple * multiple;
}

esper_status config_set(core_t *core, const esper_config *given)
{
  static const esper_config defaults;
  if (!given)
    given = &defaults;
  if (given->segments > ESPER_SEGMENTS_MAPPED)
    return error_set(ESPER_INVALID,
                     "segments is %d: use ESPER_SEGMENTS_AUTO, ESPER_SEGMENTS_CLASSIC or "
                     "ESPER_SEGMENTS_MAPPED",
                     (int)given->segments);
  if (!(given->rejection_share >= 0 && given->rejection_share < 1))
    return error_set(ESPER_INVALID,
                     "rejection_share is %g: use 0 to turn it off, or a number above 0 and below 1",
                     given->rejection_share);
  if (given->large_segment_size > SIZE_MAX / 4)
    return error_set(
        ESPER_INVALID,
        "large_segment_size is %zu bytes, which is too large: use 0 for the default, or "
        "some MiB",
        given->large_segment_size);
  for (int i = 0; i < ESPER_ROUNDUP_STEPS; i++) {
    size_t divisions = given->roundup_power2_divisions[i];
    if (divisions & (divisions - 1))
      return error_set(ESPER_INVALID, "roundup_power2_divisions has %zu: use powers of two",
                       divisions);
  }
  config_t *config = malloc(sizeof *config);
  if (!config)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the configuration");
  config->as_given = *given;
  config->max_split_size = given->max_split_size ? given->max_split_size : SIZE_MAX;
  config->max_non_split_rounding =
      given->max_non_split_rounding ? given->max_non_split_rounding : 20 * MIB;
  config->large_segment_size =
      given->large_segment_size ? round_up(given->large_segment_size, BLOCK_ALIGN) : LARGE_SEGMENT;
  lock(&core->config_lock);
  config->older = atomic_load(&core->config);
  atomic_store_explicit(&core->config, config, memory_order_release);
  unlock(&core->config_lock);
  return ESPER_OK;
}

void config_destroy_all(core_t *core)
{
  for (config_t *c = atomic_load(&core->config), *older; c; c = older) {
    older = c->older;
    free(c);
  }
}

size_t config_round(const config_t *config, size_t size)
{
  if (size > SIZE_MAX / 4)
    return 0;
  if (size <= BLOCK_ALIGN)
    return BLOCK_ALIGN;
  unsigned power = 63u - (unsigned)__builtin_clzll(size);
  unsigned step = power < 20 ? 0 : power - 20;
  if (step >= ESPER_ROUNDUP_STEPS)
    step = ESPER_ROUNDUP_STEPS - 1;
  size_t divisions = config->as_given.roundup_power2_divisions[step];
  if (divisions > 1 && (size - 1) / BLOCK_ALIGN >= divisions)
    size = round_up(size, ((size_t)1 << power) / divisions);
  return round_up(size, BLOCK_ALIGN);
}

void config_warn_once(core_t *core, atomic_bool *told, const char *text)
{
  const esper_config *given = &config_of(core)->as_given;
  if (given->warn && !atomic_exchange(told, true))
    given->warn(given->warn_context, text);
}

bool config_is_large(size_t size)
{
  return size > SMALL_MOST;
}

size_t config_segment_size(const config_t *config, size_t size)
{
  if (size <= SMALL_MOST)
    return SMALL_SEGMENT;
  if (size < LARGE_SHARED_MOST && size <= config->large_segment_size)
    return config->large_segment_size;
  return round_up(size, SEGMENT_ALIGN);
}

bool config_fits(const config_t *config, size_t have, size_t size)
{
  if (config->max_split_size == SIZE_MAX)
    return true;
  if (size < config->max_split_size)
    return have < config->max_split_size;
  return have - size < config->max_non_split_rounding;
}

bool config_splits(const config_t *config, size_t have, size_t size, bool coarse)
{
  size_t rest = have - size;
  return coarse ? rest > LARGE_REST && size < config->max_split_size : rest >= BLOCK_ALIGN;
}
