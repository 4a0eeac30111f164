#include "pool_stats.h"

#include <stdlib.h>
#include <string.h>

#include "../api/core.h"
#include "../base/error.h"
#include "stats.h"

account_t *account_open(device_t *device, uint64_t id_first, uint64_t id_second)
{
  account_t *account = device->accounts;
  while (account && (account->figures.id[0] != id_first || account->figures.id[1] != id_second))
    account = account->next;
  if (!account && (account = calloc(1, sizeof *account))) {
    account->figures.id[0] = id_first;
    account->figures.id[1] = id_second;
    account->next = device->accounts;
    device->accounts = account;
  }
  if (account)
    account->open = true;
  return account;
}

/* The figures of a pool that is gone, and all zero. */
static bool is_empty(const account_t *account)
{
  static const esper_stat none[ESPER_CLASSES];
  return !account->open && !memcmp(account->figures.reserved_bytes, none, sizeof none);
}

/* Programs make and drop pools for as long as they run: of those that are gone the
 * youngest have accounts. */
static void forget_old(device_t *device)
{
  int gone = 0;
  for (account_t **link = &device->accounts; *link;) {
    account_t *account = *link;
    if (is_empty(account) || (!account->open && ++gone > ACCOUNTS_GONE)) {
      *link = account->next;
      free(account);
    } else {
      link = &account->next;
    }
  }
}

void account_close(device_t *device, account_t *account)
{
  account->open = false;
  forget_old(device);
}

void accounts_destroy(device_t *device)
{
  for (account_t *account = device->accounts, *next; account; account = next) {
    next = account->next;
    free(account);
  }
  device->accounts = NULL;
}

/* ---- bytes ------------------------------------------------------------- */

static void change(account_t *account, bool large, size_t bytes, void (*by)(esper_stat *, size_t))
{
  if (!account)
    return;
  account->used = true;
  by(&account->figures.reserved_bytes[ESPER_ALL], bytes);
  by(&account->figures.reserved_bytes[large ? ESPER_LARGE : ESPER_SMALL], bytes);
}

void account_add(account_t *account, bool large, size_t bytes)
{
  change(account, large, bytes, stat_add);
}

void account_remove(account_t *account, bool large, size_t bytes)
{
  change(account, large, bytes, stat_sub);
}

void account_kept(account_t *account, bool large, size_t bytes)
{
  change(account, large, bytes, stat_unsub);
}

/* ---- figures ----------------------------------------------------------- */

void accounts_reset_peaks(device_t *device)
{
  for (account_t *account = device->accounts; account; account = account->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_peak(&account->figures.reserved_bytes[class]);
  forget_old(device);
}

void accounts_reset_accumulated(device_t *device)
{
  for (account_t *account = device->accounts; account; account = account->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_accumulated(&account->figures.reserved_bytes[class]);
  forget_old(device);
}

static size_t count_used(const device_t *device)
{
  size_t count = 0;
  for (const account_t *account = device->accounts; account; account = account->next)
    count += account->used;
  return count;
}

/* The list begins with the youngest. */
static void copy_used(const device_t *device, esper_pool_stats *to, size_t count)
{
  for (const account_t *account = device->accounts; account; account = account->next)
    if (account->used)
      to[--count] = account->figures;
}

esper_status esper_get_pool_stats(esper_core *core, int index, esper_pool_stats **pools,
                                  size_t *count)
{
  device_t *device;
  *pools = NULL;
  *count = 0;
  esper_status status = core_used_device(core, index, &device);
  if (!device)
    return status;
  lock(&device->lock);
  *count = count_used(device);
  *pools = *count ? malloc(*count * sizeof **pools) : NULL;
  if (*pools)
    copy_used(device, *pools, *count);
  unlock(&device->lock);
  if (*count && !*pools) {
    *count = 0;
    return error_set(ESPER_HOST_MEMORY, "no host memory for the figures of pools");
  }
  return ESPER_OK;
}

bool accounts_are_valid(const device_t *device)
{
  bool valid = true;
  for (const account_t *account = device->accounts; account && valid; account = account->next) {
    const esper_stat *reserved = account->figures.reserved_bytes;
    int64_t bytes = 0;
    for (const segment_t *s = device->first_segment; s; s = s->next)
      if (s->heap->pool->account == account)
        bytes += (int64_t)s->bytes;
    valid = reserved[ESPER_ALL].current == bytes &&
            reserved[ESPER_SMALL].current + reserved[ESPER_LARGE].current == bytes &&
            (account->used || !bytes);
  }
  return valid;
}
