/* scenarios.h: for programs of which each scenario, SCENARIO(name) {...}, needs its own process:
 * PROGRAM NAME runs it. */
#ifndef SCENARIOS_H
#define SCENARIOS_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct scenario {
  const char *name;
  void (*run)(void);
  struct scenario *next;
} scenario;

static scenario *scenarios;

#define SCENARIO(title)                                              \
  static void scenario_##title(void);                                \
  __attribute__((constructor)) static void register_##title(void)    \
  {                                                                  \
    static scenario one = {.name = #title, .run = scenario_##title}; \
    one.next = scenarios;                                            \
    scenarios = &one;                                                \
  }                                                                  \
  static void scenario_##title(void)

/* Of this process. */
static int open_files(void)
{
  int count = 0;
  DIR *files = opendir("/proc/self/fd");
  if (!files)
    abort();
  while (readdir(files))
    count++;
  closedir(files);
  return count;
}

int main(int count, char **arguments)
{
  for (const scenario *one = scenarios; one && count == 2; one = one->next)
    if (strcmp(one->name, arguments[1]) == 0) {
      one->run();
      return 0;
    }
  fprintf(stderr, "usage: %s SCENARIO\n", arguments[0]);
  return 2;
}

#endif
