#include "pool_stats.h"

#include <stdlib.h>
#include <string.h>

#include "stat.h"

pool_stats_t *pool_stats_open(pool_stats_t **list, uint64_t id_first, uint64_t id_second)
{
  pool_stats_t *stats = *list;
  while (stats && (stats->values.id[0] != id_first || stats->values.id[1] != id_second))
    stats = stats->next;
  if (!stats && (stats = calloc(1, sizeof *stats))) {
    stats->values.id[0] = id_first;
    stats->values.id[1] = id_second;
    stats->next = *list;
    *list = stats;
  }
  if (stats)
    stats->open = true;
  return stats;
}

/* Whether the pool is gone and all its statistics are zero. */
static bool is_empty(const pool_stats_t *stats)
{
  static const esper_stat none[ESPER_CLASSES];
  return !stats->open && !memcmp(stats->values.reserved_bytes, none, sizeof none);
}

/* Some programs make and drop pools for as long as they run, so only the youngest of the pools that
 * are gone keep their statistics. */
static void forget_old(pool_stats_t **list)
{
  int gone = 0;
  for (pool_stats_t **link = list; *link;) {
    pool_stats_t *stats = *link;
    if (is_empty(stats) || (!stats->open && ++gone > KEPT_OF_GONE_POOLS)) {
      *link = stats->next;
      free(stats);
    } else {
      link = &stats->next;
    }
  }
}

void pool_stats_close(pool_stats_t **list, pool_stats_t *stats)
{
  stats->open = false;
  forget_old(list);
}

void pool_stats_destroy(pool_stats_t **list)
{
  for (pool_stats_t *stats = *list, *next; stats; stats = next) {
    next = stats->next;
    free(stats);
  }
  *list = NULL;
}

void pool_stats_reset_peaks(pool_stats_t **list)
{
  for (pool_stats_t *stats = *list; stats; stats = stats->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_peak(&stats->values.reserved_bytes[class]);
  forget_old(list);
}

void pool_stats_reset_accumulated(pool_stats_t **list)
{
  for (pool_stats_t *stats = *list; stats; stats = stats->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_accumulated(&stats->values.reserved_bytes[class]);
  forget_old(list);
}
