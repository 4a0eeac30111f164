/* Asserts: in builds with them a condition that does not hold aborts and is named. */
#include "core/base/core_assert.h"

#include "check.h"

#ifdef NDEBUG
enum { CHECKED = 0 };
#else
enum { CHECKED = 1 };
#endif

static void assert_what_does_not_hold(void)
{
  int blocks = 2;
  core_assert(blocks == 3);
}

TEST(an_assert_that_does_not_hold_aborts_and_names_itself)
{
  CHECK_EQ(check_aborts(assert_what_does_not_hold, "internal error: blocks == 3 does not hold"),
           CHECKED);
  CHECK_EQ(check_aborts(assert_what_does_not_hold, "test_core_assert.c:15"), CHECKED);
}

TEST(an_assert_that_holds_says_nothing)
{
  int evaluated = 0;
  core_assert(++evaluated);
  CHECK_EQ(evaluated, CHECKED); /* without asserts the condition is not even evaluated */
}
