#include "pool_stats.h"

#include <stdlib.h>
#include <string.h>

#include "stat.h"
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
