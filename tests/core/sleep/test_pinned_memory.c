/* Pinned host memory: exactly what is needed, and no more is pinned anew than must be. */
#include "sleep/pinned_memory.h"

#include "sleep_world.h"

static pinned_memory_t pinned;

static void fit(size_t bytes)
{
  CHECK_OK(pinned_memory_fit(&pinned, &w.core->devices[0], bytes));
  CHECK_EQ(pinned.bytes, bytes);
  CHECK_EQ(alive().host_bytes, bytes);
}

static void free_pinned(void)
{
  pinned_memory_free(&pinned, &w.core->devices[0]);
  CHECK_EQ(alive().host_bytes, 0);
}

SCENE(it_is_as_large_as_is_asked)
{
  get(4, r);
  fit(600 * MIB + 512);
  CHECK_EQ(pinned.count, 3);
  fit(600 * MIB + 512);
  CHECK_EQ(calls(SIM_CALL_host_alloc), 3);
  fit(512 * MIB);
  CHECK_EQ(calls(SIM_CALL_host_alloc), 3);
  fit(700 * MIB);
  CHECK_EQ(calls(SIM_CALL_host_alloc), 4);
  fit(100 * MIB);
  CHECK_EQ(pinned.count, 1);
  fit(0);
  free_pinned();
}

SCENE(places_adjoin_within_a_chunk)
{
  get(4, r);
  fit(300 * MIB);
  size_t most;
  char *first = pinned_memory_at(&pinned, 0, &most);
  CHECK_EQ(most, 256 * MIB);
  CHECK(pinned_memory_at(&pinned, 256 * MIB - 512, &most) == first + 256 * MIB - 512);
  CHECK_EQ(most, 512);
  CHECK(pinned_memory_at(&pinned, 256 * MIB, &most) == pinned.chunks[1].memory);
  CHECK_EQ(most, 44 * MIB);
  free_pinned();
}

SCENE(what_fits_is_kept_when_more_is_refused)
{
  get(4, r);
  fit(256 * MIB);
  sim_fail_call(w.s, SIM_CALL_host_alloc, 2, ESPER_OUT_OF_MEMORY);
  CHECK_STATUS(pinned_memory_fit(&pinned, &w.core->devices[0], 800 * MIB), ESPER_HOST_MEMORY);
  CHECK_EQ(pinned.bytes, 256 * MIB);
  CHECK_EQ(alive().host_bytes, 256 * MIB);
  free_pinned();
}
