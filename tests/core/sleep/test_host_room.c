/* Pinned host memory: exactly what is needed, and no more is pinned anew than must be. */
#include "core/sleep/host_room.h"

#include "sleep_world.h"

static host_room_t room;

static void fit(size_t bytes)
{
  CHECK_OK(host_room_fit(&room, &w.core->devices[0], bytes));
  CHECK_EQ(room.bytes, bytes);
  CHECK_EQ(alive().host_bytes, bytes);
}

static void free_room(void)
{
  host_room_free(&room, &w.core->devices[0]);
  CHECK_EQ(alive().host_bytes, 0);
  end();
}

TEST(a_room_is_as_large_as_is_asked)
{
  begin();
  get(4, r);
  fit(600 * MIB + 512);
  CHECK_EQ(room.count, 3);
  fit(600 * MIB + 512);
  CHECK_EQ(calls(SIM_CALL_host_alloc), 3);
  fit(512 * MIB);
  CHECK_EQ(calls(SIM_CALL_host_alloc), 3);
  fit(700 * MIB);
  CHECK_EQ(calls(SIM_CALL_host_alloc), 4);
  fit(100 * MIB);
  CHECK_EQ(room.count, 1);
  fit(0);
  free_room();
}

TEST(places_adjoin_within_a_chunk)
{
  begin();
  get(4, r);
  fit(300 * MIB);
  size_t most;
  char *first = host_room_at(&room, 0, &most);
  CHECK_EQ(most, 256 * MIB);
  CHECK(host_room_at(&room, 256 * MIB - 512, &most) == first + 256 * MIB - 512);
  CHECK_EQ(most, 512);
  CHECK(host_room_at(&room, 256 * MIB, &most) == room.chunks[1].memory);
  CHECK_EQ(most, 44 * MIB);
  free_room();
}

TEST(a_room_that_cannot_grow_keeps_what_fits)
{
  begin();
  get(4, r);
  fit(256 * MIB);
  sim_fail_call(w.s, SIM_CALL_host_alloc, 2, ESPER_OUT_OF_MEMORY);
  CHECK_STATUS(host_room_fit(&room, &w.core->devices[0], 800 * MIB), ESPER_HOST_MEMORY);
  CHECK_EQ(room.bytes, 256 * MIB);
  CHECK_EQ(alive().host_bytes, 256 * MIB);
  free_room();
}

TEST(what_the_driver_does_not_take_back_stays)
{
  begin();
  get(4, r);
  fit(300 * MIB);
  sim_fail_call(w.s, SIM_CALL_host_free, 1, ESPER_DEVICE_ERROR);
  CHECK_OK(host_room_fit(&room, &w.core->devices[0], 256 * MIB));
  CHECK_EQ(room.bytes, 300 * MIB);
  fit(256 * MIB);
  sim_fail_call(w.s, SIM_CALL_host_free, 1, ESPER_DEVICE_ERROR);
  CHECK(!host_room_free(&room, &w.core->devices[0]));
  free_room();
}
