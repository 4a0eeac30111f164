/* Orphaned pages, which the driver neither maps nor takes back. */
#include "core/memory/orphan.h"

#include "pages_world.h"

/* ---- from inside ------------------------------------------------------------- */

static device_t *device;

static void begin_inside(void)
{
  begin();
  CHECK_OK(core_device(w.core, 0, &device));
}

/* A page of the driver that no segment has, and that goes back: to the driver if that takes it. */
static void make_page_and_release(size_t mib)
{
  const esper_driver *driver = sim_driver(w.s);
  uint64_t handle;
  CHECK_OK(driver->page_create(driver->self, 0, mib * MIB, &handle));
  lock(&device->lock);
  orphan_t *orphan = orphan_reserve(device);
  unlock(&device->lock);
  orphan_release_page(device, handle, mib * MIB, orphan);
  lock(&device->lock);
  orphan_keep(device, orphan);
  unlock(&device->lock);
}

static void refuse_releases_from(uint64_t nth)
{
  sim_fail_calls_from(w.s, SIM_CALL_page_release, nth, ESPER_DEVICE_ERROR);
}

static void refuse_no_release(void)
{
  sim_fail_call(w.s, SIM_CALL_page_release, 0, ESPER_OK);
}

static void check_orphaned(size_t mib)
{
  CHECK_EQ(device->orphaned_bytes, mib * MIB);
  CHECK_EQ(device->reserving, mib * MIB);
  CHECK(orphans_are_valid(device));
}

TEST(a_page_that_the_driver_takes_back_leaves_no_orphan)
{
  begin_inside();
  make_page_and_release(4);
  check_orphaned(0);
  CHECK(!device->orphans);
  CHECK_EQ(device->orphan_arena.live, 0);
  CHECK_EQ(orphans_give_back(device), 0);
  CHECK_EQ(calls(SIM_CALL_page_release), 1);
  end();
}

TEST(a_page_that_the_driver_refuses_to_take_back_is_counted_until_it_goes)
{
  begin_inside();
  refuse_releases_from(1);
  make_page_and_release(4);
  make_page_and_release(10);
  check_orphaned(14);
  CHECK_EQ(orphans_give_back(device), 0);
  check_orphaned(14);
  refuse_no_release();
  CHECK_EQ(orphans_give_back(device), 14 * MIB);
  check_orphaned(0);
  CHECK_EQ(device->orphan_arena.live, 0);
  CHECK_EQ(orphans_give_back(device), 0);
  end();
}

/* A driver that refuses one page is not asked about the others. */
TEST(a_refusal_ends_the_round)
{
  begin_inside();
  refuse_releases_from(1);
  for (int i = 0; i < 3; i++)
    make_page_and_release(2);
  refuse_releases_from(2);
  uint64_t asked = calls(SIM_CALL_page_release);
  CHECK_EQ(orphans_give_back(device), 2 * MIB);
  CHECK_EQ(calls(SIM_CALL_page_release), asked + 2);
  check_orphaned(4);
  refuse_no_release();
  CHECK_EQ(orphans_give_back(device), 4 * MIB);
  end();
}

/* There is room at the driver again, so that nobody is held back for the lack of it. */
TEST(a_page_that_goes_makes_growth_worth_another_try)
{
  begin_inside();
  refuse_releases_from(1);
  make_page_and_release(4);
  device->refused = 20 * MIB;
  orphans_give_back(device);
  CHECK_EQ(device->refused, 20 * MIB);
  refuse_no_release();
  orphans_give_back(device);
  CHECK_EQ(device->refused, 0);
  end();
}

TEST(an_entry_for_an_orphan_needs_host_memory)
{
  begin_inside();
  lock(&device->lock);
  check_limit_malloc(0);
  orphan_t *none = orphan_reserve(device);
  check_limit_malloc(-1);
  orphan_t *orphan = orphan_reserve(device);
  CHECK(!none && orphan && !orphan->size);
  orphan_keep(device, orphan); /* it was not needed */
  CHECK_EQ(device->orphan_arena.live, 0);
  unlock(&device->lock);
  end();
}

/* ---- in mallocs -------------------------------------------------------------- */

/* An orphaned page, which can be neither mapped nor released, is not forgotten. */
TEST(an_orphaned_page_is_tried_again)
{
  begin();
  void *p;
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25));
  sim_fail_call(w.s, SIM_CALL_page_map, 1, ESPER_DEVICE_ERROR);
  sim_fail_calls_from(w.s, SIM_CALL_page_release, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 10 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved(), 0);
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 10 * MIB);
  world_check(&w); /* the orphaned page counts */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 10 * MIB);
  CHECK_STATUS(esper_malloc(w.core, 56 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  world_check(&w);
  sim_fail_call(w.s, SIM_CALL_page_release, 0, ESPER_OK);
  get(56, r); /* of the fraction's 64 */
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 0);
  world_check(&w);
  end();
}

TEST(orphaned_pages_go_back_when_the_cache_is_emptied_or_the_core_ends)
{
  void *p;
  for (int i = 0; i < 2; i++) {
    begin();
    sim_fail_call(w.s, SIM_CALL_page_map, 1, ESPER_DEVICE_ERROR);
    sim_fail_call(w.s, SIM_CALL_page_release, 1, ESPER_DEVICE_ERROR);
    CHECK_STATUS(esper_malloc(w.core, 10 * MIB, r, &p), ESPER_DEVICE_ERROR);
    if (i == 0) {
      CHECK_OK(esper_empty_cache(w.core, 0, NULL));
      CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 0);
    }
    world_check(&w);
    end();
  }
}
