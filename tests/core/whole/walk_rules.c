/* Turns off each rule and prints which tests fail, then does the same for the holes
 * (docs/rules.md). It is built with the rule switches and linked with the tests of
 * test_lifetime_rules.c, test_never_waits.c and test_holes.c. The walk fails if a missing rule
 * makes no test fail, or a hole none of its own tests. The sixth hole has no switch: the core
 * cannot hand out a pending block. */
#include <stdbool.h>

#include "core/base/rules.h"
#include "check.h"

static const char *const NAMES[] = {
#define NAME(name, number, says) #name,
    ESPER_RULES(NAME)
#undef NAME
};

/* Cores that have one of the holes: each is what is left without a rule. */
static const struct {
  int hole;
  int rule;
} HOLED[] = {
    {1, RULE_MARK_DESPITE_CAPTURES},   {1, RULE_MARK_FROM_ANY_DEVICE},
    {1, RULE_CAPTURE_RECORDS_NOTHING}, {2, RULE_ONE_USE_A_STREAM},
    {2, RULE_COMPLETED_USES_LEAVE},    {2, RULE_NEVER_WAITS},
    {3, RULE_LOAN_MAKES_USE},          {4, RULE_RELEASE_NEEDS_COMPLETION},
    {4, RULE_UNMAP_NEEDS_COMPLETION},  {5, RULE_RELEASE_NEEDS_COMPLETION},
    {7, RULE_CAPTURE_KEEPS_APART},
};

static bool is_walk(const check_test *test)
{
  return !strncmp(test->name, "every_", 6);
}

/* Prints which tests whose name begins with `prefix` fail without the rule. */
static int catchers(int rule, const char *prefix)
{
  int caught = 0;
  esper_rules_off = 1ul << rule;
  for (const check_test *test = check_first(); test; test = test->next)
    if (!is_walk(test) && !strncmp(test->name, prefix, strlen(prefix)) && !check_passes(test))
      printf("%s%s", caught++ ? ", " : "caught by ", test->name);
  esper_rules_off = 0;
  printf("%s\n", caught ? "" : "NOT CAUGHT");
  return caught;
}

TEST(every_rule_is_caught_by_a_test)
{
  int missed = 0;
  for (int rule = 0; rule < RULE_COUNT; rule++) {
    printf("rule %s: ", NAMES[rule]);
    missed += !catchers(rule, "");
  }
  CHECK_EQ(missed, 0);
}

TEST(every_hole_is_caught_by_its_tests)
{
  int missed = 0;
  for (size_t i = 0; i < sizeof HOLED / sizeof *HOLED; i++) {
    char prefix[16];
    snprintf(prefix, sizeof prefix, "hole_%d_", HOLED[i].hole);
    printf("hole %d, without %s: ", HOLED[i].hole, NAMES[HOLED[i].rule]);
    missed += !catchers(HOLED[i].rule, prefix);
  }
  CHECK_EQ(missed, 0);
}
