#include "lock.h"

#include <pthread.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void box_lock(void)
{
  pthread_mutex_lock(&mutex);
}

bool box_try_lock(void)
{
  return pthread_mutex_trylock(&mutex) == 0;
}

void box_unlock(void)
{
  pthread_mutex_unlock(&mutex);
}

void box_lock_anew(void)
{
  pthread_mutex_init(&mutex, NULL);
}
