/* base.c: the simulation's lock, its reports, and growing arrays. */
#include "base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char last_error[256] = "sim: no error";

esper_status sim_refuse(esper_status status, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

const char *sim_last_error(void)
{
  return last_error;
}

uint64_t sim_random(uint64_t *state)
{ /* splitmix64 */
  uint64_t x = *state += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

void *sim_grow(void *array, size_t count, size_t *capacity, size_t size)
{
  if (count < *capacity)
    return array;
  *capacity = *capacity ? *capacity * 2 : 8;
  array = realloc(array, *capacity * size);
  if (!array)
    abort();
  return array;
}

void *sim_grow32(void *array, uint32_t count, uint32_t *capacity, size_t size)
{
  size_t wide = *capacity;
  array = sim_grow(array, count, &wide, size);
  *capacity = (uint32_t)wide;
  return array;
}

/* ---- failures ---------------------------------------------------------- */

void sim_report(sim *s, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  size_t left = sizeof s->report - s->report_length;
  int n = vsnprintf(s->report + s->report_length, left, format, arguments);
  va_end(arguments);
  if (n > 0)
    s->report_length += (size_t)n < left ? (size_t)n : left - 1;
}

void sim_enter(sim *s)
{
  pthread_mutex_lock(&s->lock);
}

void sim_leave(sim *s)
{
  if (s->report_length == 0) {
    pthread_mutex_unlock(&s->lock);
    return;
  }
  char report[SIM_REPORT];
  memcpy(report, s->report, s->report_length + 1);
  s->report_length = 0;
  s->failures++;
  sim_failure_fn *handler = s->on_failure;
  void *context = s->on_failure_context;
  pthread_mutex_unlock(&s->lock);
  if (handler) {
    handler(context, report);
    return;
  }
  fprintf(stderr, "simulated device: %s", report);
  abort();
}

void sim_on_failure(sim *s, sim_failure_fn *handler, void *context)
{
  sim_enter(s);
  s->on_failure = handler;
  s->on_failure_context = context;
  sim_leave(s);
}

uint64_t sim_failures(sim *s)
{
  sim_enter(s);
  uint64_t count = s->failures;
  sim_leave(s);
  return count;
}
