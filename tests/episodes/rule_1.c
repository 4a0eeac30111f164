/* Rule 1: numbers follow the driver's order. */
#include <pthread.h>
#include <time.h>

#include "episode.h"

static atomic_int waits; /* 1: the slow thread is about to wait, 2: the other event is recorded */
static pthread_t slow_thread;

/* The slow thread has its number, and stands right before the driver's call. */
static void hold_up(void)
{
  if (!pthread_equal(pthread_self(), slow_thread))
    return;
  atomic_store(&waits, 1);
  for (int i = 0; i < 100 && atomic_load(&waits) != 2; i++)
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

static void *mark_slowly(void *x)
{
  slow_thread = pthread_self();
  before_wait(hold_up);
  mark_event(x, S, O);
  return NULL;
}

/* Uses that come as an event share a stream of the core's. If the slow thread had number 1 but
 * waited for its event after number 2 was recorded, the end of 2 would be taken for that of 1. */
TEST(rule_1_numbers_follow_the_drivers_order)
{
  begin(64 * MIB);
  block x = take_written(X, R), y = take_written(Y, R), z = take(512, R);
  mark_event(&z, T, O); /* makes the shared stream */
  machine_wait(handle(S), handle(R));
  machine_stall(handle(S));
  check_on(&x, S, 0);
  read_on(&y, T, 0);
  pthread_t thread;
  atomic_store(&waits, 0);
  CHECK(pthread_create(&thread, NULL, mark_slowly, &x) == 0);
  while (!atomic_load(&waits))
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  mark_event(&y, T, O);
  atomic_store(&waits, 2);
  pthread_join(thread, NULL);
  before_wait(NULL);
  void *at = give(&x);
  machine_sync(handle(R));
  machine_sync(handle(T));
  esper_retire(p.core, 0);
  x = take_written(X, R);
  CHECK(x.at != at);
  machine_let_go(handle(O));
  END(&x, &y);
}
