#include "rules.h"

#ifdef ESPER_RULE_SWITCHES
unsigned long esper_rules_off;
#else
typedef int no_switches; /* a file may not be empty */
#endif
