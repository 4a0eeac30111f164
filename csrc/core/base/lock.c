#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "lock.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 100 };

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

enum { TURNS = 200, CYCLES = 128 }; /* after 200 turns the holder was probably interrupted */

/* Looking again sooner would take the cache line away from the holder. */
void wait_briefly(int turn)
{
  if (turn >= TURNS)
    sched_yield();
#if defined(__x86_64__) || defined(__i386__)
  else
    for (uint64_t begin = __builtin_ia32_rdtsc(); __builtin_ia32_rdtsc() - begin < CYCLES;)
      pause_briefly();
#else
  else
    for (int i = 0; i < CYCLES / 8; i++)
      pause_briefly();
#endif
}

void lock_slowly(mutex_t *mutex)
{
  for (int i = 0; i < SPINS; i++) {
    int state = LOCK_FREE;
    if (atomic_load_explicit(&mutex->state, memory_order_relaxed) == LOCK_FREE &&
        atomic_compare_exchange_weak_explicit(&mutex->state, &state, LOCK_HELD,
                                              memory_order_acquire, memory_order_relaxed))
      return;
    pause_briefly();
  }
  while (atomic_exchange_explicit(&mutex->state, LOCK_AWAITED, memory_order_acquire) != LOCK_FREE)
    syscall(SYS_futex, &mutex->state, FUTEX_WAIT_PRIVATE, LOCK_AWAITED, NULL, NULL, 0);
}

void unlock_and_wake(mutex_t *mutex)
{
  syscall(SYS_futex, &mutex->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
