/* call.c: calls of the driver's functions: their number, faults and hooks. */
#include "call.h"

#include <stdlib.h>

#include "base.h"

const char *sim_call_name(sim_call call)
{
  static const char *const NAMES[] = {
#define NAME(name) #name,
      SIM_CALLS(NAME)
#undef NAME
          "any"};
  return call <= SIM_CALL_any ? NAMES[call] : NULL;
}

static void set_fault(sim *s, sim_call call, sim_fault fault)
{
  sim_enter(s);
  s->faults[call] = fault;
  sim_leave(s);
}

void sim_fail_call(sim *s, sim_call call, uint64_t nth, esper_status status)
{
  set_fault(s, call, (sim_fault){nth, 0, status});
}

void sim_fail_calls_from(sim *s, sim_call call, uint64_t nth, esper_status status)
{
  set_fault(s, call, (sim_fault){nth, 1, status});
}

uint64_t sim_faults(sim *s)
{
  sim_enter(s);
  uint64_t count = s->faults_happened;
  sim_leave(s);
  return count;
}

static int fault_happens(sim_fault *fault)
{
  if (fault->nth == 0)
    return 0;
  if (fault->nth > 1) {
    fault->nth--;
    return 0;
  }
  if (!fault->sticky)
    fault->nth = 0;
  return 1;
}

/* Counts a call. Any status but ESPER_OK is a fault that the call must return at once. */
esper_status sim_call_count(sim *s, sim_call call)
{
  s->calls[call]++;
  s->calls[SIM_CALL_any]++;
  for (int any = 0; any < 2; any++) {
    sim_fault *fault = &s->faults[any ? SIM_CALL_any : call];
    if (!fault_happens(fault))
      continue;
    s->faults_happened++;
    return sim_refuse(fault->status, "sim: %s failed as asked", sim_call_name(call));
  }
  return ESPER_OK;
}

static void set_hook(sim *s, sim_call call, int after, sim_hook_fn *run, void *context)
{
  if (call >= SIM_CALL_COUNT)
    return;
  sim_hook *hook = NULL;
  if (run) {
    hook = malloc(sizeof *hook);
    if (!hook)
      abort();
    *hook = (sim_hook){run, context};
  }
  sim_hook *old = atomic_exchange(&s->hooks[call][after], hook);
  if (!old)
    return;
  sim_enter(s); /* another thread may be running it: keep it to the end */
  s->old_hooks =
      sim_grow(s->old_hooks, s->old_hook_count, &s->old_hook_capacity, sizeof(sim_hook *));
  s->old_hooks[s->old_hook_count++] = old;
  sim_leave(s);
}

void sim_before_call(sim *s, sim_call call, sim_hook_fn *hook, void *context)
{
  set_hook(s, call, 0, hook, context);
}

void sim_after_call(sim *s, sim_call call, sim_hook_fn *hook, void *context)
{
  set_hook(s, call, 1, hook, context);
}

void sim_call_hook(sim *s, sim_call call, int after, int device, void *object)
{
  sim_hook *hook = atomic_load_explicit(&s->hooks[call][after], memory_order_acquire);
  if (hook)
    hook->run(hook->context, call, device, object);
}

uint64_t sim_calls(sim *s, sim_call call)
{
  sim_enter(s);
  uint64_t count = s->calls[call];
  sim_leave(s);
  return count;
}

void sim_calls_init(sim *s)
{
  for (int call = 0; call < SIM_CALL_COUNT; call++)
    for (int after = 0; after < 2; after++)
      atomic_init(&s->hooks[call][after], NULL);
}

void sim_calls_destroy(sim *s)
{
  for (int call = 0; call < SIM_CALL_COUNT; call++)
    for (int after = 0; after < 2; after++)
      free(atomic_load(&s->hooks[call][after]));
  for (size_t i = 0; i < s->old_hook_count; i++)
    free(s->old_hooks[i]);
  free(s->old_hooks);
}
