#include "call.h"

static bool call_begin(core_t *c, int call)
{
  if (core_is(c, CORE_SHUT_DOWN))
    return false;
  lock_order_call_driver();
  /* Two threads that count at once may count only one call. A locked instruction would count both,
   * but take longer than the shortest calls. */
  uint64_t calls = atomic_load_explicit(&c->driver_calls[call], memory_order_relaxed);
  atomic_store_explicit(&c->driver_calls[call], calls + 1, memory_order_relaxed);
  return true;
}

esper_status call_end(core_t *c, esper_status status)
{
  if (status == ESPER_SHUT_DOWN)
    atomic_fetch_or(&c->modes, CORE_SHUT_DOWN);
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
