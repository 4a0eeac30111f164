/* Mapped segments: which pages go back, captures, and a whole program. */
#include <time.h>

#include "core/api/testing.h"
#include "pages_world.h"

/* ---- pages go back --------------------------------------------------------- */

SCENE(the_base_of_a_block_is_its_stretch)
{
  comb(20, 4, r);
  esper_block_info info;
  void *base;
  size_t size;
  CHECK_OK(esper_find_block(w.core, pieces[3], &info));
  CHECK(info.mapped);
  CHECK_OK(esper_find_base(w.core, (char *)pieces[3] + 5, &base, &size));
  CHECK(base == pieces[0]);
  CHECK_EQ(size, 80 * MIB);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_OK(esper_find_base(w.core, pieces[3], &base, &size));
  CHECK(base == pieces[3]);
  CHECK_EQ(size, 20 * MIB);
  CHECK_STATUS(esper_find_base(w.core, pieces[2], &base, &size), ESPER_INVALID);
}

/* Free memory on both sides of a hole: only the hole is filled. */
SCENE(a_hole_between_free_blocks_is_filled_alone)
{
  void *a = get(20, r), *b = get(20, r), *c = get(20, r), *stays = get(20, r);
  world_free(&w, b);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved_mib(), 60);
  world_free(&w, a);
  world_free(&w, c);
  CHECK(get(60, r) == a);
  CHECK_EQ(reserved_mib(), 80);
  world_free(&w, stays);
}

/* ---- captures -------------------------------------------------------------- */

/* Pages that move part their stretch before they join two others. */
SCENE(stretches_on_the_way_are_no_peak)
{
  void *p[6];
  for (int i = 0; i < 6; i++)
    p[i] = get(20, r);
  world_free(&w, p[1]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  world_free(&w, p[0]);
  world_free(&w, p[4]);
  CHECK(get(40, r) == p[0]);
  CHECK_EQ(reserved_mib(), 100);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].peak, 2);
}

/* What parts a stretch goes back last. */
SCENE(whole_stretches_go_back_first)
{
  comb(20, 5, r);
  world_kernel(&w, r, pieces[1]); /* its pages do not move meanwhile */
  world_free(&w, get(20, s));
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved_mib(), 40);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].peak, 2);
}

/* What another thread takes while the driver is at work does not go. */
static void *taken[2];
SIM_HOOK(take_meanwhile)
{
  if (!taken[0])
    for (int i = 0; i < 2; i++)
      taken[i] = get(20, r);
}

SCENE(what_was_taken_meanwhile_stays)
{
  comb(20, 9, r);
  taken[0] = taken[1] = NULL;
  sim_before_call(w.s, SIM_CALL_page_release, take_meanwhile, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_before_call(w.s, SIM_CALL_page_release, NULL, NULL);
  CHECK_EQ(reserved_mib(), 80 + 40);
  for (int i = 0; i < 2; i++) {
    world_kernel(&w, r, taken[i]);
    world_free(&w, taken[i]);
  }
  world_run(&w, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved_mib(), 80);
}

static double cpu_seconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

enum { MANY = 12000 };

/* All blocks are not walked over for each: then it would take eight times as long as
 * getting them did; sanitizers make it three. */
SCENE_WITH(many_scattered_pages_go_back_in_little_time,
           begin_on((sim_options){.virtual_memory = 1, .capacity = (size_t)MANY * 2 * MIB}, NULL))
{
  static void *p[MANY];
  double begun = cpu_seconds();
  for (int i = 0; i < MANY; i++)
    p[i] = get(2, w.stream[0]);
  double got = cpu_seconds();
  for (int i = 0; i < MANY; i += 2)
    world_free(&w, p[i]);
  double freed = cpu_seconds();
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  double released = cpu_seconds();
  CHECK_EQ(reserved_mib(), MANY);
  CHECK(released - freed < 5 * (got - begun));
}
