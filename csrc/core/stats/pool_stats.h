/* account.h: what private pools have reserved. Under the device's lock.
 *
 * A pool has an account from its making on. It outlives the pool for as long as it has
 * something to say: until resets have made it all zero, or so many younger ones have
 * outlived theirs. */
#ifndef ESPER_ACCOUNT_H
#define ESPER_ACCOUNT_H

#include "../base/types.h"

/* What a private pool has reserved: account.h. */
struct account {
  esper_pool_stats figures;
  bool open;       /* its pool is there */
  bool used;       /* it had memory */
  account_t *next; /* of the device, older ones */
};

enum { ACCOUNTS_GONE = 256 }; /* of pools that are gone, of a device */

/* `accounts` is a device's list, the youngest first.
 *
 * The account of a pool that is being made: a new one, or that of an earlier pool with
 * the id. NULL: no host memory. */
account_t *account_open(account_t **accounts, uint64_t id_first, uint64_t id_second);
/* Its pool is gone. */
void account_close(account_t **accounts, account_t *account);
void accounts_destroy(account_t **accounts);

/* Bytes came from the device, or went back; `account` may be NULL: the default pool's.
 * `kept`: the device would not take back what counts as gone. */
void account_add(account_t *account, bool large, size_t bytes);
void account_remove(account_t *account, bool large, size_t bytes);
void account_kept(account_t *account, bool large, size_t bytes);

void accounts_reset_peaks(account_t **accounts);
void accounts_reset_accumulated(account_t **accounts);

#endif
