#include "call.h"

#include "../blocks/block_cache.h"

static bool call_begin(core_t *c, int call)
{
  if (atomic_load_explicit(&c->shut_down, memory_order_relaxed))
    return false;
  /* A locked instruction would be dearer than the shorter calls. */
  uint64_t calls = atomic_load_explicit(&c->driver_calls[call], memory_order_relaxed);
  atomic_store_explicit(&c->driver_calls[call], calls + 1, memory_order_relaxed);
  return true;
}

esper_status call_end(core_t *c, esper_status status)
{
  if (status == ESPER_SHUT_DOWN)
    atomic_store(&c->shut_down, true);
  return status;
}

#define CALL_DEFINE(name, parameters, arguments)                                \
  esper_status call_##name parameters                                           \
  {                                                                             \
    if (!call_begin(c, CALL_##name))                                            \
      return ESPER_SHUT_DOWN;                                                   \
    return call_end(c, c->driver->name(c->driver->self, CALL_STRIP arguments)); \
  }
ESPER_DRIVER_FUNCTIONS(CALL_DEFINE)

const char *esper_driver_call_name(int call)
{
  static const char *const names[] = {
#define CALL_NAME(name, parameters, arguments) #name,
      ESPER_DRIVER_FUNCTIONS(CALL_NAME)
#undef CALL_NAME
  };
  return call >= 0 && call < CALL_COUNT ? names[call] : NULL;
}

uint64_t esper_driver_calls(const esper_core *core, int call)
{
  if (call < 0 || call >= CALL_COUNT)
    return 0;
  uint64_t calls = atomic_load_explicit(&core->driver_calls[call], memory_order_relaxed);
  for (int i = 0; call == CALL_stream_capture && i < core->device_count; i++)
    calls += fronts_questions(&core->devices[i]);
  return calls;
}
