/* The lists of what sleeps. */
#include "sleep_world.h"

TEST(a_sleeper_is_reused_once_it_is_empty)
{
  begin();
  get(4, r);
  device_t *device = &w.core->devices[0];
  lock(&device->sleep_lock);
  sleeper_t *first = sleeper_of(device, 3);
  CHECK(first && first == sleeper_of(device, 3));
  sleeper_t *other = sleeper_of(device, 4);
  CHECK(other && other != first);
  CHECK(sleeper_reserve(first, 1, 2) && first->page_capacity >= 1 && first->parcel_capacity >= 2);
  first->page_count = 1;
  first->pages[0] = (sleeping_page_t){.parcels = 0};
  sleeper_t *second = sleeper_of(device, 3);
  CHECK(second && second != first);
  first->pages[0].awake = true;
  sleeper_forget_awake(first);
  CHECK_EQ(first->page_count, 0);
  sleepers_trim(device, false);
  CHECK(!device->sleepers);
  unlock(&device->sleep_lock);
  end();
}

TEST(forgetting_pages_keeps_the_others_parcels)
{
  sleeper_t list = {0};
  CHECK(sleeper_reserve(&list, 3, 4));
  for (int i = 0; i < 3; i++)
    list.pages[list.page_count++] =
        (sleeping_page_t){.first = (size_t)i, .parcels = i == 1 ? 2 : 1};
  for (int i = 0; i < 4; i++)
    list.parcels[list.parcel_count++] = (parcel_t){.size = 512u << i, .offset = (size_t)i};
  list.pages[1].awake = true;
  sleeper_forget_awake(&list);
  CHECK_EQ(list.page_count, 2);
  CHECK_EQ(list.parcel_count, 2);
  CHECK_EQ(list.pages[1].first, 2);
  CHECK_EQ(list.parcels[0].size, 512);
  CHECK_EQ(list.parcels[1].size, 4096);
  CHECK_EQ(list.kept, 512 + 4096);
  free(list.pages);
  free(list.parcels);
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
  char a[10], b[30];
  pinned_chunk_t chunks[2] = {{a, sizeof a}, {b, sizeof b}};
  sleeper_t list = {.pinned = {.chunks = chunks, .count = 2, .bytes = 40}};
  parcel_t parcel = {.address = 1000, .size = 25, .offset = 5};
  CHECK_OK(sleeper_copy(NULL, &list, &parcel, see));
  CHECK_EQ(pieces_seen, 25);
}

/* One page is refused, and goes later: two lists of pages, each with host memory. */
TEST(the_next_sleep_uses_the_larger_host_memory)
{
  begin();
  used_as("t", 60 * MIB, r);
  used_as("t", 4096, r);
  sim_fail_call(w.s, SIM_CALL_page_unmap, 1, ESPER_DEVICE_ERROR);
  CHECK_OK(try_sleep("t", ESPER_KEEP_HOST, NULL));
  CHECK_OK(try_sleep("t", ESPER_KEEP_HOST, NULL));
  size_t pinned = stats_of("t").host;
  wake("t");
  CHECK_OK(try_sleep("t", ESPER_KEEP_HOST, NULL));
  CHECK(stats_of("t").host <= pinned + 8 * MIB);
  wake("t");
  end();
}
