/* The lists of what sleeps. */
#include "sleep_world.h"

SCENE(a_sleeper_is_reused_once_it_is_empty)
{
  get(4, r);
  device_t *device = &w.core->devices[0];
  lock(&device->sleep_lock);
  sleeping_t *first = sleeper_of(device, 3);
  CHECK(first && first == sleeper_of(device, 3));
  sleeping_t *other = sleeper_of(device, 4);
  CHECK(other && other != first);
  CHECK(sleeping_reserve(first, 1, 2) && first->page_capacity >= 1 && first->parcel_capacity >= 2);
  first->page_count = 1;
  first->pages[0] = (sleeping_page_t){.parcels = 0};
  sleeping_t *second = sleeper_of(device, 3);
  CHECK(second && second != first);
  sleeping_clear(first);
  CHECK_EQ(first->page_count, 0);
  sleepers_trim(device, false);
  CHECK(!device->sleeping);
  unlock(&device->sleep_lock);
}

static size_t pieces_seen;

static esper_status see(device_t *device, uintptr_t address, char *host, size_t size)
{
  (void)device;
  (void)host;
  CHECK_EQ(address, 1000 + pieces_seen);
  pieces_seen += size;
  return ESPER_OK;
}

TEST(a_parcel_is_copied_in_the_pieces_of_the_pinned_memory)
{
  device_t device = {0};
  char a[10], b[30];
  pinned_chunk_t chunks[2] = {{a, sizeof a}, {b, sizeof b}};
  sleeper_t list = {.pinned = {.chunks = chunks, .count = 2, .bytes = 40}};
  parcel_t parcel = {.address = 1000, .size = 25, .offset = 5};
  sleeper_copy(&device, &list, &parcel, see);
  CHECK_EQ(pieces_seen, 25);
}
