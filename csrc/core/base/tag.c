#include "tag.h"

#include <pthread.h>
#include <string.h>

#include "../../esper_sleep.h"
#include "error.h"

enum { NAME = 64, NESTED = 64 };

static char names[TAGS][NAME]; /* the first is TAG_NONE's */
static atomic_uint count = 1;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
atomic_bool tags_exist;

static _Thread_local tag_t pushed[NESTED];
static _Thread_local unsigned depth;

tag_t tag_innermost(void)
{
  return depth ? pushed[depth - 1] : TAG_NONE;
}

int tag_find(const char *name)
{
  unsigned end = tag_count();
  for (unsigned i = 1; i < end; i++)
    if (!strcmp(names[i], name))
      return (int)i;
  return -1;
}

unsigned tag_count(void)
{
  return atomic_load_explicit(&count, memory_order_acquire);
}

const char *tag_name(tag_t tag)
{
  return names[tag];
}

/* A forked child has no thread that could give the lock back. */
static void before_fork(void)
{
  pthread_mutex_lock(&names_lock);
}

static void after_fork(void)
{
  pthread_mutex_unlock(&names_lock);
}

static void watch_forks(void)
{
  pthread_atfork(before_fork, after_fork, after_fork);
}

/* Finds or makes the tag with that name; -1: there are too many. */
static int intern(const char *name)
{
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch_forks);
  int tag = tag_find(name);
  if (tag >= 0)
    return tag;
  pthread_mutex_lock(&names_lock);
  tag = tag_find(name);
  unsigned end = tag_count();
  if (tag < 0 && end < TAGS) {
    strcpy(names[end], name);
    atomic_store_explicit(&count, end + 1, memory_order_release);
    tag = (int)end;
  }
  pthread_mutex_unlock(&names_lock);
  return tag;
}

esper_status esper_tag_push(const char *name)
{
  if (!name || !*name || strlen(name) >= NAME)
    return error_set(ESPER_INVALID, "a tag needs a name of 1 to %d bytes", NAME - 1);
  if (depth == NESTED)
    return error_set(ESPER_INVALID, "%d tags are pushed on this thread: pop some first", NESTED);
  int tag = intern(name);
  if (tag < 0)
    return error_set(ESPER_INVALID,
                     "there are %d tags already, and '%s' would be one more: use fewer names",
                     TAGS - 1, name);
  pushed[depth++] = (tag_t)tag;
  atomic_store(&tags_exist, true);
  return ESPER_OK;
}

esper_status esper_tag_pop(void)
{
  if (!depth)
    return error_set(ESPER_INVALID, "this thread has pushed no tag");
  depth--;
  return ESPER_OK;
}

const char *esper_tag_current(void)
{
  return tag_name(tag_innermost());
}
