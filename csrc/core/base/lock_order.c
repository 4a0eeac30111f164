#include "lock_order.h"

#ifdef ESPER_LOCK_ORDER
#include <stdio.h>
#include <stdlib.h>

enum { MOST = LOCK_RANK_COUNT }; /* each rank at most once */

static _Thread_local struct {
  struct {
    const void *lock;
    lock_rank rank;
  } held[MOST];
  int count;
  unsigned long taken[LOCK_RANK_COUNT];
} mine;

static const char *const rank_names[] = {
#define LOCK_RANK_NAME(name, says) says,
    LOCK_RANKS(LOCK_RANK_NAME)
#undef LOCK_RANK_NAME
};

static void fail(const char *what, lock_rank held)
{
  fprintf(stderr, "lock order: %s while the thread holds %s\n", what, rank_names[held]);
  abort();
}

static lock_rank highest(void)
{
  lock_rank rank = LOCK_UNRANKED;
  for (int i = 0; i < mine.count; i++)
    if (mine.held[i].rank > rank)
      rank = mine.held[i].rank;
  return rank;
}

void lock_order_check(lock_rank rank)
{
  lock_rank held = highest();
  if (rank == LOCK_UNRANKED || rank <= held)
    fail(rank_names[rank], held);
}

void lock_order_take(const void *lock, lock_rank rank)
{
  lock_order_check(rank);
  mine.held[mine.count].lock = lock;
  mine.held[mine.count++].rank = rank;
  mine.taken[rank]++;
}

void lock_order_leave(const void *lock)
{
  for (int i = 0; i < mine.count; i++)
    if (mine.held[i].lock == lock) {
      mine.held[i] = mine.held[--mine.count];
      return;
    }
  fail("a lock is released that the thread does not hold", highest());
}

void lock_order_call_driver(void)
{
  lock_rank held = highest();
  if (held >= LOCK_DEVICE)
    fail("a driver call", held);
}

unsigned long lock_order_taken(lock_rank rank)
{
  return mine.taken[rank];
}
#endif
