/* Turns off one rule after the other and prints which episodes of its number fail. The walk fails
 * if there is a rule without which none does. The core is built with the switches of its rules. */
#include <stdbool.h>
#include <time.h>

#include "core/base/rules.h"
#include "check.h"

static const struct {
  const char *name, *number;
} RULES[] = {
#define NAME(name, number, says) {#name, number},
    ESPER_RULES(NAME)
#undef NAME
};

/* On a GPU the host may be too slow to get in a late reader's way. */
#ifdef MACHINE_SIM
enum { TRIES = 1 };
#else
enum { TRIES = 10 };
#endif

static bool is_caught(int rule)
{
  char prefix[16];
  bool caught = false;
  time_t began = time(NULL);
  snprintf(prefix, sizeof prefix, "rule_%s_", RULES[rule].number);
  printf("rule %s, %s: ", RULES[rule].number, RULES[rule].name);
  esper_rules_off = 1ul << rule;
  for (int i = 0; i < TRIES && !caught; i++)
    for (const check_test *test = check_first(); test; test = test->next)
      if (!strncmp(test->name, prefix, strlen(prefix)) && !check_passes(test)) {
        printf("%s%s", caught ? ", " : "caught by ", test->name);
        caught = true;
      }
  esper_rules_off = 0;
  printf("%s (%d s)\n", caught ? "" : "NOT CAUGHT", (int)(time(NULL) - began));
  return caught;
}

TEST(every_rule_is_caught_by_an_episode_of_its_number)
{
  int missed = 0;
  for (int rule = 0; rule < RULE_COUNT; rule++)
    missed += !is_caught(rule);
  CHECK_EQ(missed, 0);
}
