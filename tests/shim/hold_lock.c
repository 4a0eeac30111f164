/* hold_lock.c: lets a thread hold a lock of PyTorch's for as long as a test wants. Preloaded, it
 * stands in front of pthread_mutex_unlock: the first lock of libtorch_cpu's that the chosen thread
 * would give back is kept until release_lock(). */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define SHOWN __attribute__((visibility("default")))

static _Thread_local int is_chosen;
static atomic_int is_held, may_go;

/* The calling thread is the one. */
SHOWN void hold_next_lock(void)
{
  is_chosen = 1;
}
SHOWN int lock_is_held(void)
{
  return atomic_load(&is_held);
}
SHOWN void release_lock(void)
{
  atomic_store(&may_go, 1);
}

SHOWN int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
  static int (*_Atomic unlock)(pthread_mutex_t *);
  if (!unlock)
    unlock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
  Dl_info caller;
  if (is_chosen && dladdr(__builtin_return_address(0), &caller) && caller.dli_fname &&
      strstr(caller.dli_fname, "libtorch_cpu")) {
    is_chosen = 0;
    atomic_store(&is_held, 1);
    while (!atomic_load(&may_go))
      usleep(1000);
  }
  return unlock(mutex);
}
