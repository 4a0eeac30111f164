#include "pool_stats.h"

#include <stdlib.h>
#include <string.h>

#include "stat.h"
#include "stats.h"

account_t *account_open(account_t **accounts, uint64_t id_first, uint64_t id_second)
{
  account_t *account = *accounts;
  while (account && (account->figures.id[0] != id_first || account->figures.id[1] != id_second))
    account = account->next;
  if (!account && (account = calloc(1, sizeof *account))) {
    account->figures.id[0] = id_first;
    account->figures.id[1] = id_second;
    account->next = *accounts;
    *accounts = account;
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
static void forget_old(account_t **accounts)
{
  int gone = 0;
  for (account_t **link = accounts; *link;) {
    account_t *account = *link;
    if (is_empty(account) || (!account->open && ++gone > ACCOUNTS_GONE)) {
      *link = account->next;
      free(account);
    } else {
      link = &account->next;
    }
  }
}

void account_close(account_t **accounts, account_t *account)
{
  account->open = false;
  forget_old(accounts);
}

void accounts_destroy(account_t **accounts)
{
  for (account_t *account = *accounts, *next; account; account = next) {
    next = account->next;
    free(account);
  }
  *accounts = NULL;
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

void accounts_reset_peaks(account_t **accounts)
{
  for (account_t *account = *accounts; account; account = account->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_peak(&account->figures.reserved_bytes[class]);
  forget_old(accounts);
}

void accounts_reset_accumulated(account_t **accounts)
{
  for (account_t *account = *accounts; account; account = account->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_accumulated(&account->figures.reserved_bytes[class]);
  forget_old(accounts);
}
