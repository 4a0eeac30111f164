/* Quiescing: a pool's free memory owes nothing when a capture begins to take from it. */
#include "core/requests/quiesce.h"

#include "core/blocks/block.h"
#include "core/blocks/use.h"
#include "core/pools/pool.h"
#include "core/requests/drain.h"
#include "order/captures_world.h"

enum { ID = 7 };

/* From here on allocations go to the pool, which is quiesced first. */
static void open_pool(void)
{
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_any_stream, NULL));
}

static void close_pool(void)
{
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
}

static void open_again(void)
{
  close_pool();
  open_pool();
}

static device_t *device(void)
{
  return &w.core->devices[0];
}

static pool_t *pool(void)
{
  lock(&device()->lock);
  pool_t *found = pool_find(device(), ID, 0);
  unlock(&device()->lock);
  return found;
}

/* x was used on s by work that has not run, and is free. */
static void *owe_use(void)
{
  void *x = block(X, r);
  read_and_free(x, s);
  return x;
}

static const block_t *find(const void *address)
{
  for (const segment_t *at = device()->first_segment; at; at = at->next)
    for (const block_t *b = at->first; b; b = b->next)
      if (b->address == (uintptr_t)address)
        return b;
  return NULL;
}

/* How many free blocks of the pool owe something. */
static int owing(void)
{
  int count = 0;
  for (const segment_t *at = device()->first_segment; at; at = at->next)
    for (const block_t *b = at->first; b && at->heap->pool == pool(); b = b->next)
      count +=
          block_is_in_bin(b) && (b->uses || b->stamp || b->withheld || b->state != BLOCK_READY);
  return count;
}

/* ---- what is waited for -------------------------------------------------------- */

SCENE(a_pools_free_memory_owes_nothing_afterwards)
{
  open_pool();
  owe_use();
  world_free(&w, block(Y, t)); /* owner order alone */
  void *z = block(16 * MIB, r);
  world_record_stream(&w, z, s);
  world_read_on(&w, s, z, r);
  world_free(&w, z);
  CHECK_EQ(owing(), 3);
  close_pool();
  uint64_t before = calls(SIM_CALL_event_wait);
  open_pool();
  CHECK_EQ(owing(), 0);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 0);
  CHECK_EQ(calls(SIM_CALL_event_wait) - before,
           2); /* for all streams, which is for what r and t freed; for s */
  CHECK_EQ(sim_pending_all(w.s), 0);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_device_synchronize), 0);
  close_pool();
}

SCENE(live_memory_keeps_its_uses_and_is_not_waited_for)
{
  open_pool();
  void *x = block(X, r);
  world_read_marked(&w, s, x, r);
  open_again();
  CHECK(sim_pending(w.s, 0, s.handle) > 0);
  CHECK(find(x)->state == BLOCK_LIVE && find(x)->uses);
  close_pool();
}

/* What s waits for is enqueued when the pool has been begun. */
SCENE(what_is_waited_for_in_vain_is_withheld_until_the_next_time)
{
  open_pool();
  sim_wait_flag(w.s, 0, s.handle, 0);
  void *x = owe_use();
  open_again();
  CHECK(find(x)->withheld && find(x)->uses);
  sim_raise_flag_now(w.s, 0);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  CHECK(find(x)->withheld); /* though it owes no use any more */
  capture_begin();
  CHECK(block(X, r) != x);
  capture_end();
  open_again();
  CHECK_EQ(owing(), 0);
  close_pool();
}

/* Each stream is tried once, and of very many not all. */
static void fail_to_wait_for(int readers, uint64_t tried)
{
  begin();
  open_pool();
  void *x = block(X, r);
  for (int i = 0; i < readers; i++) {
    esper_stream reader = world_stream(&w, 0);
    world_read_marked(&w, reader, x, r);
  }
  world_free(&w, x);
  close_pool();
  uint64_t before = calls(SIM_CALL_event_wait);
  sim_fail_calls_from(w.s, SIM_CALL_event_wait, 1, ESPER_DEVICE_ERROR);
  open_pool();
  CHECK_EQ(calls(SIM_CALL_event_wait) - before, tried);
  CHECK(find(x)->withheld && find(x)->uses);
  sim_fail_call(w.s, SIM_CALL_event_wait, 0, ESPER_OK);
  open_again();
  CHECK_EQ(owing(), 0);
  close_pool();
  end();
}

TEST(waits_that_fail_end_and_withhold)
{
  fail_to_wait_for(5, 5 + 2); /* for all streams and for r, too */
  fail_to_wait_for(70, 64 + 1);
}

/* ---- captures that are over ------------------------------------------------------ */

static int heaps(void)
{
  int count = 0;
  for (const heap_t *heap = pool()->heaps; heap; heap = heap->next)
    count++;
  return count;
}

SCENE(captures_that_are_over_leave_one_heap_to_a_stream)
{
  open_pool();
  void *x[2];
  for (int i = 0; i < 2; i++) {
    capture_begin();
    sim_capture_group(w.s, 0, r.handle, ID);
    x[i] = block(X, r);
    world_free(&w, x[i]);
    capture_end();
  }
  CHECK(x[0] != x[1]);
  CHECK_EQ(heaps(), 2);
  open_again();
  CHECK_EQ(heaps(), 1);
  CHECK_EQ(owing(), 0);
  capture_begin();
  sim_capture_group(w.s, 0, r.handle, ID);
  void *a = block(X, r), *b = block(X, r);
  CHECK((a == x[0] && b == x[1]) || (a == x[1] && b == x[0]));
  capture_end();
  close_pool();
}

/* What a forward graph saved serves inside the next capture where that frees it, but not if its
 * owner may still be using it outside. */
TEST(live_memory_serves_the_next_capture_only_if_its_owner_was_waited_for)
{
  for (int waited = 0; waited < 2; waited++) {
    begin();
    open_pool();
    capture_begin();
    sim_capture_group(w.s, 0, r.handle, ID);
    void *saved = block(X, r);
    capture_end();
    close_pool();
    world_kernel(&w, r, saved);
    sim_fail_call(w.s, SIM_CALL_event_wait, !waited, ESPER_DEVICE_ERROR);
    open_pool();
    capture_begin();
    sim_capture_group(w.s, 0, r.handle, ID);
    world_free(&w, world_malloc(&w, 512, r)); /* the heap is this capture's now */
    world_free(&w, saved);
    CHECK_EQ(world_malloc(&w, X, r) == saved, waited);
    sim_graph_destroy(w.s, sim_capture_end(w.s, 0, r.handle));
    close_pool();
    end();
  }
}

/* A graph of device 0's pool reads x on a stream of device 1, and is replayed there by another one.
 * The use has no point in the graph. The pool was begun again in between. */
SCENE_WITH(what_another_device_reads_is_held_when_a_pool_is_begun_again,
           begin_on((sim_options){WHEN_TOLD, .devices = 2}, NULL))
{
  esper_stream far = world_stream(&w, 1), on = world_stream(&w, 1);
  world_free(&w, world_malloc(&w, 512, far));
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, world_any_stream, NULL));
  capture_begin();
  void *x = world_malloc(&w, X, r);
  world_read_on(&w, far, x, r);
  world_record_stream(&w, x, far);
  sim_fail_calls_from(w.s, SIM_CALL_capture_tails, 1, ESPER_DEVICE_ERROR);
  world_free(&w, x);
  sim_fail_calls_from(w.s, SIM_CALL_capture_tails, 0, ESPER_OK);
  world_wait(&w, r, far);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  sim_graph_launch(w.s, graph, 1, on.handle);
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, world_any_stream, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  world_malloc(&w, 512, far); /* it presents itself */
  world_run(&w, far);
  esper_retire(w.core, 1);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_OK(esper_pool_empty(w.core, 0, 1, 0)); /* or the oracle complains */
  sim_run_all(w.s);
}

/* ---- where the host cannot wait for all streams -------------------------------- */

/* t reads x, which s frees, and s is ordered after that only when the pool has been begun again.
 * Its memory is for s, and not for r's capture. */
SCENE(after_a_wait_in_vain_a_capture_gets_nothing_that_others_may_read)
{
  open_pool();
  void *x = block(X, s), *z = block(Y, r);
  world_read_on(&w, t, x, s);
  world_free(&w, x);
  close_pool();
  sim_wait_flag(w.s, 0, o.handle, 0);
  world_use(&w, z, o, 0);
  world_free(&w, z);
  open_pool();
  world_wait(&w, s, t);
  capture_begin();
  CHECK(block(X, r) != x);
  sim_capture_group(w.s, 0, r.handle, ID);
  sim_graph *graph = captured(r);
  CHECK(block(X, s) == x);
  sim_graph_destroy(w.s, graph);
  sim_raise_flag_now(w.s, 0);
  sim_run_all(w.s);
}

static esper_driver freeing;
static const esper_driver *driver_below;
static void *to_free;

static esper_status wait_then_free(void *self, int on, void *event, unsigned microseconds)
{
  esper_status status = driver_below->event_wait(self, on, event, microseconds);
  void *x = to_free;
  to_free = NULL;
  if (x) {
    world_kernel(&w, s, x);
    world_free(&w, x);
  }
  return status;
}

/* The pool has live memory of a capture, so the host waits for s. Another thread frees x after
 * that. */
SCENE(what_is_freed_after_its_stream_was_waited_for_is_withheld)
{
  open_pool();
  sim_capture_begin(w.s, 0, s.handle);
  block(Y, s);
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  open_again();
  void *x = block(X, s);
  close_pool();
  driver_below = w.core->driver;
  freeing = *driver_below;
  freeing.event_wait = wait_then_free;
  w.core->driver = &freeing;
  to_free = x;
  open_pool();
  w.core->driver = driver_below;
  CHECK(!to_free);
  CHECK(find(x)->withheld);
  sim_graph_destroy(w.s, graph);
  sim_run_all(w.s);
}

SCENE(a_withheld_block_is_active_until_its_marked_uses_are_over)
{
  open_pool();
  void *x = block(X, s);
  open_again();
  world_read_marked(&w, t, x, s);
  world_free(&w, x);
  CHECK(find(x)->withheld);
  CHECK_EQ(world_stats(&w, 0).active_bytes[ESPER_ALL].current, X);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  CHECK_EQ(world_stats(&w, 0).active_bytes[ESPER_ALL].current, 0);
}

/* ---- pools that are gone ----------------------------------------------------------- */

/* r captures into the pool; then the graph is destroyed and nobody refers to the pool. */
static void *leave_memory_of_a_graph(void)
{
  open_pool();
  capture_begin();
  void *x = block(X, r);
  world_free(&w, x);
  capture_end();
  close_pool();
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  CHECK_EQ(pool()->references, 0);
  return x;
}

SCENE(memory_of_a_pool_that_is_gone_waits_for_the_device)
{
  const block_t *x = find(leave_memory_of_a_graph());
  quiesce_unreferenced(device(), NULL);
  CHECK(x->segment->heap->capture);
  CHECK_OK(drain_device(device(), 0));
  quiesce_unreferenced(device(), NULL);
  CHECK(!x->segment->heap->capture);
  CHECK_EQ(owing(), 0);
}

SCENE(nothing_happens_under_the_hands_of_another_call)
{
  const block_t *x = find(leave_memory_of_a_graph());
  CHECK_OK(drain_device(device(), 0));
  pool_t *found = pool();
  lock(&device()->lock);
  pool_enter(found);
  unlock(&device()->lock);
  quiesce_unreferenced(device(), NULL);
  quiesce_pool(found);
  CHECK(x->segment->heap->capture);
  quiesce_unreferenced(device(), found); /* its own is no other call */
  CHECK(!x->segment->heap->capture);
  lock(&device()->lock);
  pool_leave(found);
  unlock(&device()->lock);
}
