#include "lock_order.h"

#ifdef ESPER_LOCK_ORDER
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static _Thread_local struct {
  unsigned held;  /* a bit for each rank */
  unsigned sleep; /* how many sleep locks are held */
  unsigned long taken[LOCK_RANK_COUNT];
} mine;

static const char *const rank_names[] = {
#define LOCK_RANK_NAME(name, says) says,
    LOCK_RANKS(LOCK_RANK_NAME)
#undef LOCK_RANK_NAME
};

static lock_rank highest(void)
{
  return mine.held ? (lock_rank)(31 - __builtin_clz(mine.held)) : LOCK_UNRANKED;
}

static void expect(int holds, const char *what)
{
  if (holds)
    return;
  fprintf(stderr, "lock order: %s while the thread holds %s\n", what, rank_names[highest()]);
  abort();
}

void lock_order_check(lock_rank rank)
{
  bool is_another_sleep_lock = rank == LOCK_SLEEP && highest() == LOCK_SLEEP;
  expect(rank > highest() || is_another_sleep_lock, rank_names[rank]);
}

void lock_order_take(lock_rank rank)
{
  lock_order_check(rank);
  mine.held |= 1u << rank;
  mine.sleep += rank == LOCK_SLEEP;
  mine.taken[rank]++;
}

void lock_order_leave(lock_rank rank)
{
  expect((int)(mine.held >> rank & 1), "a lock is released that the thread does not hold");
  if (rank == LOCK_SLEEP && --mine.sleep)
    return;
  mine.held &= ~(1u << rank);
}

void lock_order_call_driver(void)
{
  expect(highest() < LOCK_DEVICE, "a driver call");
}

unsigned long lock_order_taken(lock_rank rank)
{
  return mine.taken[rank];
}
#endif
