/* Tags of a thread: they nest, other threads do not see them, and bad ones are refused. */
#include "core/base/tag.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "esper_sleep.h"

TEST(tags_nest_and_the_innermost_counts)
{
  CHECK_EQ(tag_current(), TAG_NONE);
  CHECK(!strcmp(esper_tag_current(), ""));
  CHECK_OK(esper_tag_push("weights"));
  tag_t weights = tag_current();
  CHECK(weights != TAG_NONE && !strcmp(tag_name(weights), "weights"));
  CHECK_OK(esper_tag_push("kv"));
  CHECK(tag_current() != weights && !strcmp(esper_tag_current(), "kv"));
  CHECK_OK(esper_tag_pop());
  CHECK_EQ(tag_current(), weights);
  CHECK_OK(esper_tag_pop());
  CHECK_EQ(tag_current(), TAG_NONE);
}

TEST(a_name_is_always_the_same_tag)
{
  CHECK_EQ(tag_find("optimizer"), -1);
  unsigned before = tag_count();
  for (int i = 0; i < 3; i++) {
    CHECK_OK(esper_tag_push("optimizer"));
    CHECK_EQ(tag_current(), tag_find("optimizer"));
    CHECK_OK(esper_tag_pop());
  }
  CHECK_EQ(tag_count(), before + 1);
}

static void see_none(void *context)
{
  (void)context;
  CHECK_EQ(tag_current(), TAG_NONE);
  CHECK_STATUS(esper_tag_pop(), ESPER_INVALID);
}

TEST(other_threads_do_not_see_a_tag)
{
  CHECK_OK(esper_tag_push("weights"));
  check_on_another_thread(see_none, NULL);
  CHECK(!strcmp(esper_tag_current(), "weights"));
  CHECK_OK(esper_tag_pop());
}

TEST(bad_tags_are_refused_and_change_nothing)
{
  char name[65] = {0};
  memset(name, 'x', 64);
  CHECK_STATUS(esper_tag_push(NULL), ESPER_INVALID);
  CHECK_STATUS(esper_tag_push(""), ESPER_INVALID);
  CHECK_STATUS(esper_tag_push(name), ESPER_INVALID);
  CHECK_EQ(tag_current(), TAG_NONE);
  name[63] = 0;
  CHECK_OK(esper_tag_push(name));
  CHECK(!strcmp(esper_tag_current(), name));
  for (int i = 1; i < 64; i++)
    CHECK_OK(esper_tag_push("weights"));
  CHECK_STATUS(esper_tag_push("kv"), ESPER_INVALID);
  CHECK(!strcmp(esper_tag_current(), "weights"));
  for (int i = 0; i < 64; i++)
    CHECK_OK(esper_tag_pop());
  CHECK_REFUSED(esper_tag_pop(), ESPER_INVALID, "pushed no tag");
}

/* So that a new one is looked for under the lock each time. */
static void make_all_tags(void)
{
  char name[16];
  for (unsigned i = tag_count(); i < TAGS; i++) {
    snprintf(name, sizeof name, "tag %u", i);
    CHECK_OK(esper_tag_push(name));
    CHECK_OK(esper_tag_pop());
  }
}

TEST(a_process_has_at_most_255_tags)
{
  make_all_tags();
  CHECK_REFUSED(esper_tag_push("one more"), ESPER_INVALID, "'one more'");
  CHECK_EQ(tag_current(), TAG_NONE);
  CHECK_OK(esper_tag_push(tag_name(TAGS - 1)));
  CHECK_OK(esper_tag_pop());
}

static atomic_bool enough;

static void *look_for_tags(void *context)
{
  while (!atomic_load(&enough))
    CHECK_STATUS(esper_tag_push("one more"), ESPER_INVALID);
  return context;
}

TEST(a_child_can_push_tags_whatever_others_did_at_the_fork)
{
  pthread_t other;
  make_all_tags();
  atomic_store(&enough, false);
  CHECK(!pthread_create(&other, NULL, look_for_tags, NULL));
  for (int i = 0; i < 50; i++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(600); /* ends a child that waits for ever */
      _exit(esper_tag_push("one more") != ESPER_INVALID);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  atomic_store(&enough, true);
  pthread_join(other, NULL);
}
