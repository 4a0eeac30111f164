/* Several threads and the block caches of their streams, also while others look on. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "blocks/heap_world.h"
#include "core/api/checkpoint.h"
#include "draw.h"

enum { THREADS = 4, TURNS = 4000, SHELF = 16 };

static _Atomic(void *) shelf[SHELF]; /* blocks on their way to another thread */
static atomic_bool running;

/* Blocks on its own stream and on a common one, of the pool that may be NULL and of sizes that
 * depend on what was drawn; freed by whoever finds them. */
static void *work_with(void *argument, esper_pool *from, size_t size_of(uint64_t drawn))
{
  uint64_t state = (uint64_t)(uintptr_t)argument;
  int self = (int)(state % THREADS);
  for (int i = 0; i < TURNS; i++) {
    uint64_t x = draw64(&state);
    void *p;
    esper_stream stream = w.stream[x % 8 ? self : THREADS];
    CHECK_OK(from ? esper_malloc_from(w.core, from, size_of(x / 8), stream, &p)
                  : esper_malloc(w.core, size_of(x / 8), stream, &p));
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[x / 64 % SHELF], p)));
  }
  return NULL;
}

static size_t few_sizes(uint64_t drawn)
{
  static const size_t SIZES[] = {512, 512, 4096, 4096, MIB, 3 * MIB, 300 * KIB};
  return SIZES[drawn % 7];
}

static void *work(void *argument)
{
  return work_with(argument, NULL, few_sizes);
}

static void *look(void *argument)
{
  (void)argument;
  esper_stats stats;
  esper_snapshot snapshot;
  while (atomic_load(&running)) {
    CHECK(esper_core_is_valid(w.core));
    CHECK_OK(esper_get_stats(w.core, 0, &stats));
    CHECK(stats.active_bytes[ESPER_ALL].current <= stats.active_bytes[ESPER_ALL].peak);
    CHECK(stats.allocated_bytes[ESPER_ALL].current <= stats.active_bytes[ESPER_ALL].current);
    CHECK(stats.active_bytes[ESPER_ALL].current <= stats.reserved_bytes[ESPER_ALL].current);
    CHECK_EQ(stats.allocation[ESPER_ALL].current,
             stats.allocation[ESPER_ALL].allocated - stats.allocation[ESPER_ALL].freed);
    CHECK(stats.allocation[ESPER_ALL].current >= 0 &&
          stats.allocation[ESPER_ALL].current <= SHELF + THREADS);
    CHECK_EQ(stats.active_bytes[ESPER_ALL].current,
             stats.active_bytes[ESPER_SMALL].current + stats.active_bytes[ESPER_LARGE].current);
    CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
    size_t live = 0;
    for (size_t i = 0; i < snapshot.block_count; i++)
      live += snapshot.blocks[i].state == ESPER_BLOCK_ALLOCATED;
    CHECK(live <= SHELF + THREADS);
    esper_snapshot_free(&snapshot);
  }
  return NULL;
}

/* Pages go back and come again under those who work. */
static void *look_and_empty(void *argument)
{
  while (atomic_load(&running)) {
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
    CHECK(esper_core_is_valid(w.core));
    sched_yield();
  }
  return look(argument);
}

/* So that pages move. */
static size_t sizes_that_leave_holes(uint64_t drawn)
{
  return drawn % 3 ? (drawn / 8 % 3 + 1) * 2 * MIB : (drawn / 8 % 12 + 1) * MIB;
}

static void *work_on_pages(void *argument)
{
  return work_with(argument, NULL, sizes_that_leave_holes);
}

static esper_pool *pool;

static void *work_in_pool(void *argument)
{
  return work_with(argument, pool, few_sizes);
}

static void *write_down(void *argument)
{
  (void)argument;
  while (atomic_load(&running)) {
    esper_checkpoint *checkpoint;
    CHECK_OK(esper_checkpoint_take(w.core, 0, 7, 0, &checkpoint));
    CHECK(checkpoint_is_valid(checkpoint));
    size_t live = 0;
    for (size_t i = 0; i < checkpoint->part_count; i++)
      live += checkpoint->parts[i].live;
    CHECK(live <= SHELF + THREADS);
    esper_checkpoint_free(checkpoint);
  }
  return NULL;
}

static void free_shelf(void)
{
  for (int i = 0; i < SHELF; i++)
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[i], NULL)));
}

/* `looker` may be NULL: nobody looks on. */
static void run_threads(void *worker(void *), void *looker(void *))
{
  pthread_t threads[THREADS + 1];
  atomic_store(&running, true);
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&threads[i], NULL, worker, (void *)(uintptr_t)(100 * THREADS + i)));
  if (looker)
    CHECK(!pthread_create(&threads[THREADS], NULL, looker, NULL));
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  atomic_store(&running, false);
  if (looker)
    pthread_join(threads[THREADS], NULL);
}

SCENE(threads_hand_memory_to_each_other)
{
  run_threads(work, NULL);
  CHECK(esper_core_is_valid(w.core));
  esper_stats stats = figures();
  CHECK_EQ(stats.allocation[ESPER_ALL].allocated, THREADS * TURNS);
  CHECK(stats.allocation[ESPER_ALL].peak <= SHELF + THREADS);
  CHECK(stats.allocation[ESPER_ALL].peak >= SHELF);
  free_shelf();
  CHECK_EQ(figures().active_bytes[ESPER_ALL].current, 0);
}

SCENE(statistics_and_snapshots_are_right_while_threads_allocate)
{
  run_threads(work, look);
  free_shelf();
  CHECK_EQ(figures().allocation[ESPER_ALL].freed, THREADS * TURNS);
}

static void *begin_to_observe(void *argument)
{
  while (atomic_load(&running)) {
    CHECK_OK(esper_note_unseen_uses(w.core));
    sched_yield();
  }
  return argument;
}

/* Blocks get uses while their owners free them: ThreadSanitizer sees who looks without a lock. */
SCENE(an_observer_begins_while_threads_allocate)
{
  run_threads(work, begin_to_observe);
  free_shelf();
  CHECK(esper_core_is_valid(w.core));
  CHECK_EQ(figures().allocation[ESPER_ALL].freed, THREADS * TURNS);
}

SCENE_WITH(statistics_and_snapshots_are_right_while_pages_move, begin_on_pages())
{
  run_threads(work_on_pages, look_and_empty);
  CHECK(sim_calls(w.s, SIM_CALL_page_unmap) > 0);
  free_shelf();
  CHECK_EQ(figures().allocation[ESPER_ALL].freed, THREADS * TURNS);
  CHECK_EQ(figures().active_bytes[ESPER_ALL].current, 0);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(figures().reserved_bytes[ESPER_ALL].current, 0);
}

SCENE(checkpoints_are_of_one_moment_while_threads_allocate)
{
  pool = world_pool(&w, 0, 7, 0);
  run_threads(work_in_pool, write_down);
  free_shelf();
  CHECK_EQ(figures().active_bytes[ESPER_ALL].current, 0);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
}
