/* Pages of another process, mapped here: opened, used and closed. */
#include "core/requests/imports.h"

#include "memory/sharing_world.h"

/* ---- both have it ---------------------------------------------------------- */

SCENE(it_may_be_opened_more_than_once)
{
  void *p = get(9);
  sent x = share(p), y = share(p);
  char *a = open_there(&x), *b = open_there(&y);
  CHECK(a != b);
  CHECK_EQ(alive().mappings, x.count * 3);
  close_there(&x);
  touch(t, b, 9 * MIB);
  close_there(&y);
  CHECK_EQ(alive().mappings, x.count);
}

TEST(what_is_not_closed_goes_with_the_core)
{
  begin();
  sent x, y;
  send_there(get(9), &x);
  send_there(world_malloc(&w, 512, r), &y);
  free(x.pages);
  free(y.pages);
  end(); /* which looks for what is left */
}

/* ---- closing --------------------------------------------------------------- */

/* The oracle complains if it does not. */
SCENE(closing_waits_for_what_is_at_work)
{
  void *p = get(9);
  sent x;
  char *q = send_there(p, &x);
  touch(t, q, 9 * MIB);
  CHECK_EQ(sim_pending_all(w.s), 1);
  close_there(&x);
  CHECK_EQ(sim_pending_all(w.s), 0);
  CHECK_EQ(alive().ranges, 1);
}

SCENE(closing_waits_for_peers_at_work)
{
  void *p = get(9), *known;
  sent x;
  CHECK_OK(esper_malloc(there, 512, t_far, &known));
  CHECK_OK(esper_add_peer(there, 0, 1));
  char *q = send_there(p, &x);
  touch(t_far, q, 9 * MIB);
  close_there(&x);
  CHECK_EQ(sim_pending(w.s, 1, t_far.handle), 0);
  CHECK_EQ(alive().ranges, 1);
}

SCENE(in_a_capture_closing_is_for_later)
{
  void *p = get(9), *q;
  sent x;
  char *a = send_there(p, &x);
  touch(t, a, 9 * MIB);
  esper_stream other = world_mortal(&w, 0); /* takes part in waiting for the device */
  CHECK_OK(esper_malloc(there, 512, other, &q));
  CHECK_OK(esper_malloc(there, 512, t, &q));
  sim_capture_begin(w.s, 0, t.handle);
  close_there(&x);
  CHECK_EQ(alive().ranges, 3);
  CHECK(sim_capture_is_valid(w.s, 0, t.handle));
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, t.handle));
  CHECK_STATUS(esper_close_shared(there, x.base), ESPER_INVALID); /* it is closed */
  CHECK_EQ(alive().ranges, 3);
  CHECK_OK(esper_empty_cache(there, 0, NULL));
  CHECK_EQ(alive().ranges, 2);
}

/* Its stream has got no memory yet, so nobody knows of it. */
SCENE(while_a_pool_is_open_closing_is_for_later)
{
  sent x;
  send_there(get(9), &x);
  esper_stream unmet = world_stream(&w, 0);
  CHECK_OK(esper_pool_begin(there, 0, 9, 0, world_any_stream, NULL));
  sim_capture_begin(w.s, 0, unmet.handle);
  close_there(&x);
  CHECK(sim_capture_is_valid(w.s, 0, unmet.handle));
  CHECK_EQ(alive().ranges, 2);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, unmet.handle));
  CHECK_OK(esper_pool_end(there, 0, 9, 0, NULL));
  CHECK_OK(esper_pool_release(there, 0, 9, 0));
  CHECK_OK(esper_empty_cache(there, 0, NULL));
  CHECK_EQ(alive().ranges, 1);
}

SCENE(what_was_waited_for_in_vain_is_unmapped_later)
{
  sent x, y;
  char *a = send_there(get(9), &x);
  send_there(get(5), &y);
  sim_wait_flag(w.s, 0, t.handle, 0);
  touch(t, a, 9 * MIB);
  uint64_t unmapped = calls(SIM_CALL_page_unmap);
  close_there(&x);
  CHECK(sim_pending_all(w.s) > 0);
  CHECK_EQ(calls(SIM_CALL_page_unmap), unmapped);
  sim_raise_flag_now(w.s, 0);
  sim_run_all(w.s);
  close_there(&y); /* and the other one */
  CHECK_EQ(calls(SIM_CALL_page_unmap), unmapped + x.count + y.count);
  CHECK_EQ(alive().ranges, 1);
}

/* ---- peers ----------------------------------------------------------------- */

SCENE(peers_access_what_is_shared)
{
  sent x, y;
  char *a = send_there(get(9), &x);
  CHECK(!sim_may_access(w.s, 1, a, 9 * MIB));
  CHECK_OK(esper_add_peer(there, 0, 1));
  CHECK(sim_may_access(w.s, 1, a, 9 * MIB));
  char *b = send_there(get(12), &y);
  CHECK(sim_may_access(w.s, 1, b, 12 * MIB));
  close_there(&x);
  close_there(&y);
}

/* ---- the driver refuses ---------------------------------------------------- */

SCENE(names_that_make_no_sense_are_refused)
{
  sent x = share(get(9));
  esper_page_name wrong = x.pages[0];
  void *base;
  sim_alive before = alive();
  CHECK_STATUS(esper_open_shared(there, 0, x.pages, 0, &base), ESPER_INVALID);
  CHECK_STATUS(esper_open_shared(there, 2, x.pages, 1, &base), ESPER_INVALID);
  wrong.size = 12345;
  CHECK_REFUSED(esper_open_shared(there, 0, &wrong, 1, &base), ESPER_INVALID, "multiple of");
  wrong.size = (uint64_t)1 << 63;
  CHECK_STATUS(esper_open_shared(there, 0, &wrong, 1, &base), ESPER_INVALID);
  wrong = x.pages[0];
  wrong.key++;
  CHECK_STATUS(esper_open_shared(there, 0, &wrong, 1, &base), ESPER_INVALID);
  sim_alive after = alive();
  CHECK(!base && !memcmp(&before, &after, sizeof before));
  free(x.pages);
}

TEST(a_device_without_pages_opens_none)
{
  esper_page_name name = {.size = 2 * MIB};
  void *base;
  world_begin(&w);
  CHECK_STATUS(esper_open_shared(w.core, 0, &name, 1, &base), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "classic segments"));
  world_end(&w);
}
