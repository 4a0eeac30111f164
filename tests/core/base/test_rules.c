/* The names, the numbers and the switches of the lifetime rules. Only the build with
 * ESPER_RULE_SWITCHES can turn a rule off. */
#include "core/base/rules.h"

#include <stdbool.h>

#include "check.h"

static const struct {
  const char *name, *number, *says;
} RULES[] = {
#define ROW(name, number, says) {#name, number, says},
    ESPER_RULES(ROW)
#undef ROW
};

TEST(each_rule_has_a_name_a_number_and_a_sentence_of_its_own)
{
  CHECK_EQ(sizeof RULES / sizeof *RULES, RULE_COUNT);
  for (int i = 0; i < RULE_COUNT; i++) {
    CHECK(strlen(RULES[i].says) > 10);
    for (int k = 0; k < i; k++) {
      CHECK(strcmp(RULES[i].name, RULES[k].name));
      CHECK(strcmp(RULES[i].number, RULES[k].number));
      CHECK(strcmp(RULES[i].says, RULES[k].says));
    }
  }
}

/* "3", "3b", "4a", ...: as in docs/rules.md. */
TEST(rules_come_in_the_order_of_their_numbers)
{
  int section = 0;
  char letter = 0;
  for (int i = 0; i < RULE_COUNT; i++) {
    char *rest;
    int number = (int)strtol(RULES[i].number, &rest, 10);
    CHECK(number == section ? *rest > letter : number > section);
    CHECK(!*rest || (*rest >= 'a' && *rest <= 'z' && !rest[1]));
    CHECK(number == section || !*rest || *rest == 'a');
    section = number;
    letter = *rest ? *rest : 'a';
  }
}

static bool holds(int rule)
{
  switch (rule) {
#define CASE(name, number, says) \
  case RULE_##name: return RULE(name);
    ESPER_RULES(CASE)
#undef CASE
  default: return false;
  }
}

#ifdef ESPER_RULE_SWITCHES

enum { SWITCHES = 1 };

static void turn_off(unsigned long rules)
{
  esper_rules_off = rules;
}

#else

enum { SWITCHES = 0 };

extern unsigned long esper_rules_off __attribute__((weak));

/* There is no word to set a bit in, and the compiler knows that each rule holds. */
static void turn_off(unsigned long rules)
{
#define HOLDS(name, number, says) _Static_assert(RULE(name) == 1, #name);
  ESPER_RULES(HOLDS)
#undef HOLDS
  (void)rules;
  CHECK(!&esper_rules_off);
}

#endif

TEST(all_rules_hold_until_one_is_turned_off)
{
  for (int rule = 0; rule < RULE_COUNT; rule++)
    CHECK(holds(rule));
  turn_off(0);
  for (int rule = 0; rule < RULE_COUNT; rule++)
    CHECK(holds(rule));
}

TEST(a_switch_turns_one_rule_off_and_without_switches_none_goes)
{
  CHECK(RULE_COUNT <= 8 * sizeof(unsigned long)); /* the last one's bit is in the word, too */
  for (int off = 0; off < RULE_COUNT; off++) {
    turn_off(1ul << off);
    for (int rule = 0; rule < RULE_COUNT; rule++)
      CHECK_EQ(holds(rule), !SWITCHES || rule != off);
  }
  turn_off(0);
}

TEST(several_rules_may_be_off_at_once)
{
  turn_off(1ul << RULE_STAMP_IS_NEXT | 1ul << RULE_NEVER_WAITS);
  CHECK_EQ(RULE(STAMP_IS_NEXT), !SWITCHES);
  CHECK_EQ(RULE(NEVER_WAITS), !SWITCHES);
  CHECK(RULE(CACHE_STAMPS) && RULE(WAITS_END));
  turn_off(0);
  CHECK(RULE(STAMP_IS_NEXT));
}
