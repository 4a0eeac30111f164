/* The fault loop runs one scenario that uses everything again and again. For every function of the
 * driver and every status that it may return, the first call fails, then the second, and so on,
 * until the scenario ends before the fault. After every failure the core must be valid, the oracle
 * satisfied, nothing leaked, and memory available again; unless the driver kept memory, for then
 * the device says that it has failed, and serves no more (csrc/core/memory/failure.h).
 *
 * It runs with classic and with mapped segments. With a sticky fault the function fails from its
 * Nth call on until the scenario is over, as after a broken context.
 *
 * ESPER_FAULT_STEP=64 lets only every 64th call fail. */
#include <stdbool.h>

#include "core/api/testing.h"
#include "core/base/core.h"
#include "core/order/device.h"
#include "esper_sleep.h"
#include "world.h"

enum { DEVICES = 2, LIVE = 64, CAPACITY = 64 };
/* By name, so that created pools have them, too; classic where the device cannot. */
static const esper_config CONFIG = {.segments = ESPER_SEGMENTS_MAPPED};

typedef struct live {
  void *ptr;
  esper_stream owner;
} live;

static sim *s;
static esper_core *core;
static live blocks[LIVE];
static int block_count;
static bool shut_down; /* the fault is ESPER_SHUT_DOWN */
static bool mapped;    /* segments, where they are not classic */
static char situation[128];

static void oracle_failed(void *context, const char *report)
{
  (void)context;
  check_failed(__FILE__, __LINE__, "%s: %s", situation, report);
}

#define EXPECT(x) ((x) ? (void)0 : check_failed(__FILE__, __LINE__, "%s: %s", situation, #x))

static bool has_failed(int device)
{
  return device_has_failed(&core->devices[device]);
}

/* ---- a program that can live with errors ---------------------------------- */

static void *get(size_t size, esper_stream stream)
{
  void *ptr = NULL;
  esper_status status = esper_malloc(core, size, stream, &ptr);
  if (status != ESPER_OK) {
    EXPECT(!ptr);
    EXPECT(esper_last_error()[0]);
    return NULL;
  }
  EXPECT(!has_failed(stream.device));
  esper_block_info info;
  EXPECT(esper_find_block(core, ptr, &info) == ESPER_OK);
  sim_owner_begin(s, ptr, info.size, stream.device, stream.handle);
  sim_kernel(s, stream.device, stream.handle, ptr, info.size, SIM_WRITE);
  EXPECT(block_count < LIVE);
  blocks[block_count++] = (live){ptr, stream};
  return ptr;
}

static live *find(const void *ptr)
{
  for (int i = 0; i < block_count; i++)
    if (blocks[i].ptr == ptr)
      return &blocks[i];
  return NULL;
}

static void put(void *ptr)
{
  live *b = find(ptr);
  if (!b)
    return; /* it was not to be had */
  *b = blocks[--block_count];
  sim_owner_end(s, ptr);
  EXPECT(esper_free(core, ptr) == ESPER_OK); /* cannot fail */
}

static bool read_on(esper_stream reader, void *ptr)
{
  const live *b = find(ptr);
  if (!b || has_failed(b->owner.device)) /* it may be asleep for good */
    return false;
  if (reader.device != b->owner.device &&
      esper_add_peer(core, b->owner.device, reader.device) != ESPER_OK)
    return false;
  sim_stream_wait_stream(s, reader.device, reader.handle, b->owner.device, b->owner.handle);
  sim_kernel(s, reader.device, reader.handle, ptr, 512, SIM_READ);
  return true;
}

/* A mark that was refused has done nothing, so the owner waits itself. */
static void marked(esper_status status, esper_stream reader, void *ptr)
{
  if (status == ESPER_OK)
    return;
  EXPECT(esper_last_error()[0]);
  const live *b = find(ptr);
  sim_stream_wait_stream(s, b->owner.device, b->owner.handle, reader.device, reader.handle);
}

static void use(esper_stream reader, void *ptr, unsigned flags)
{
  const void *p = ptr;
  if (read_on(reader, ptr))
    marked(esper_record_use(core, &p, 1, reader, flags, NULL), reader, ptr);
}

static void use_event(esper_stream reader, void *ptr)
{
  const void *p = ptr;
  if (!read_on(reader, ptr))
    return;
  void *event = sim_event_create(s, reader.device);
  sim_event_record(s, reader.device, event, reader.handle);
  marked(esper_record_use_event(core, &p, 1, event, reader.device, NULL), reader, ptr);
  sim_event_destroy(s, reader.device, event);
}

static void use_at_free(esper_stream reader, void *ptr)
{
  if (read_on(reader, ptr))
    marked(esper_record_stream(core, ptr, reader), reader, ptr);
}

static void use_by_all(esper_stream reader, void *ptr)
{
  if (read_on(reader, ptr))
    marked(esper_free_after_all(core, ptr), reader, ptr);
}

/* Ends a capture and runs its graph. A stream that is not `known`, for lack of an id, is nobody to
 * the core. */
static void end_and_launch(esper_stream captured, esper_stream on, bool known)
{
  sim_graph *graph = sim_capture_end(s, 0, captured.handle);
  EXPECT(graph || !known);
  if (graph) {
    sim_graph_launch(s, graph, 0, on.handle);
    sim_graph_destroy(s, graph);
  }
}

static int is_captured(void *context, void *stream)
{
  const esper_stream *streams = context;
  return stream == streams[0].handle || stream == streams[1].handle;
}

static void *get_from_pool(size_t size, esper_stream *both)
{
  if (esper_pool_begin(core, 0, 5, 0, is_captured, both) != ESPER_OK)
    return NULL;
  void *ptr = get(size, both[0]);
  EXPECT(esper_pool_end(core, 0, 5, 0, NULL) == ESPER_OK);
  EXPECT(esper_pool_release(core, 0, 5, 0) == ESPER_OK);
  return ptr;
}

/* A checkpoint of the pool is taken, and put back when one block was freed and
 * another one, which ends a read with its free, is younger. */
static void checkpoint(esper_stream *both)
{
  esper_checkpoint *taken;
  esper_checkpoint_delta delta;
  /* Replays are the program's to order. */
  sim_stream_wait_stream(s, 0, both[0].handle, 0, both[1].handle);
  void *x = get_from_pool(3 * MIB, both);
  if (esper_checkpoint_take(core, 0, 5, 0, &taken) != ESPER_OK)
    return;
  void *y = get_from_pool(9 * MIB, both);
  use(both[1], x, 0);
  use_at_free(both[1], y);
  put(x);
  if (esper_checkpoint_restore(core, taken, &delta) == ESPER_OK) {
    EXPECT(delta.freed_count == (y != NULL));
    EXPECT(delta.live_count == (x != NULL));
    if (y) {
      live *freed = find(y);
      *freed = blocks[--block_count];
      sim_owner_end(s, y);
    }
    if (x)
      EXPECT(esper_free(core, x) == ESPER_OK);
    EXPECT(esper_core_is_valid(core));
    free(delta.freed);
  }
  put(get_from_pool(9 * MIB, both));
  esper_checkpoint_free(taken);
}

/* Two neighbours in a pool that are both read serve together when the host has waited for both. */
static void range_in_pool(esper_stream *both)
{
  if (esper_pool_begin(core, 0, 8, 0, is_captured, both) != ESPER_OK)
    return;
  void *x = get(3 * MIB, both[0]), *y = get(3 * MIB, both[0]);
  use(both[1], x, 0);
  use(both[1], y, 0);
  put(x);
  put(y);
  put(get(5 * MIB, both[0]));
  put(get(2 * MIB, both[0]));
  EXPECT(esper_core_is_valid(core));
  EXPECT(esper_pool_end(core, 0, 8, 0, NULL) == ESPER_OK);
  EXPECT(esper_pool_release(core, 0, 8, 0) == ESPER_OK);
}

/* A capture into a private pool: warm-up memory, a fork with marks of every
 * kind, reuse inside, replays, and the pool's end. The program is right whatever
 * the core was refused: it orders its readers itself before the end. */
static void pool_capture(esper_stream c, esper_stream d, bool known)
{
  esper_stream both[2] = {c, d};
  if (esper_pool_begin(core, 0, 5, 0, is_captured, both) != ESPER_OK)
    return;
  put(get(3 * MIB, c));
  void *warm = get(2 * MIB, c);
  EXPECT(esper_pool_end(core, 0, 5, 0, NULL) == ESPER_OK);
  bool begun = esper_pool_begin(core, 0, 5, 0, is_captured, both) == ESPER_OK;
  sim_capture_begin(s, 0, c.handle);
  sim_capture_group(s, 0, c.handle, 5);
  sim_stream_wait_stream(s, 0, d.handle, 0, c.handle);
  void *x = get(3 * MIB, c), *y = get(3 * MIB, d), *z = get(200000, c), *v = get(100000, d);
  use(d, x, 0);
  use(c, y, ESPER_USE_UNTIL_FREE);
  use_at_free(d, z);
  put(warm);
  put(x);
  put(y);
  put(z);
  put(get(3 * MIB, c));
  put(get(3 * MIB, d));
  put(get(200000, c));
  void *only = get(14 * MIB, c);
  use(d, only, 0);
  put(only);
  put(get(14 * MIB, c)); /* d still reads the last one */
  put(get((size_t)CAPACITY * MIB, c));
  sim_stream_wait_stream(s, 0, c.handle, 0, d.handle);
  put(v);
  put(get(3 * MIB, c));
  put(get(100000, c));
  EXPECT(esper_core_is_valid(core));
  end_and_launch(c, d, known);
  if (begun) {
    EXPECT(esper_pool_end(core, 0, 5, 0, NULL) == ESPER_OK);
    EXPECT(esper_pool_release(core, 0, 5, 0) == ESPER_OK);
  }
  checkpoint(both);
  EXPECT(esper_pool_release(core, 0, 5, 0) == ESPER_OK);
}

static int is_one_of_three(void *context, void *stream)
{
  const esper_stream *streams = context;
  return is_captured(context, stream) || stream == streams[2].handle;
}

/* Two captures open at once, of which the one becomes a node of the other, and a
 * conditional node whose body reads what is freed while the body is captured. */
static void nested_captures(esper_stream c, esper_stream d, esper_stream e, bool known)
{
  esper_stream three[3] = {c, d, e};
  if (esper_pool_begin(core, 0, 6, 0, is_one_of_three, three) != ESPER_OK)
    return;
  sim_capture_begin(s, 0, c.handle);
  sim_capture_begin(s, 0, d.handle);
  void *x = get(200000, c);
  put(get(200000, d));
  put(get(200000, d));
  put(x); /* freed while the thread works in the other capture */
  put(get(200000, c));
  sim_graph *child = sim_capture_end(s, 0, d.handle);
  void *y = get(300000, c);
  sim_stream_wait_stream(s, 0, e.handle, 0, c.handle);
  if (child)
    sim_graph_launch(s, child, 0, e.handle);
  use(e, y, 0);
  put(y);
  put(get(300000, c)); /* an edge leads to the read, behind the other graph */
  void *z = get(400000, e);
  sim_stream_wait_stream(s, 0, c.handle, 0, e.handle);
  sim_capture_body(s, 0, c.handle, d.handle);
  put(get(100000, d));
  if (z)
    sim_kernel(s, 0, d.handle, z, 512, SIM_READ);
  put(z);
  put(get(400000, e)); /* which does not come after the body */
  put(get(100000, d));
  EXPECT(!sim_capture_end(s, 0, d.handle));
  sim_stream_wait_stream(s, 0, c.handle, 0, e.handle);
  put(get(400000, c));
  EXPECT(esper_core_is_valid(core));
  end_and_launch(c, c, known);
  EXPECT(esper_pool_end(core, 0, 6, 0, NULL) == ESPER_OK);
  if (child)
    sim_graph_destroy(s, child);
  EXPECT(esper_pool_release(core, 0, 6, 0) == ESPER_OK);
}

/* Pages get names, and are opened as by another process, with a peer at work there. */
static void share(esper_stream r, esper_stream far)
{
  esper_page_name *pages;
  size_t count;
  void *address, *base, *kept = get(3000, r), *x = get(7 * MIB, r);
  bool reached = x && esper_add_peer(core, 0, 1) == ESPER_OK;
  if (kept && esper_share(core, kept, &address, &pages, &count) == ESPER_OK)
    free(pages);
  if (x && esper_share(core, x, &address, &pages, &count) == ESPER_OK) {
    EXPECT(count > 0);
    if (esper_open_shared(core, 0, pages, count, &base) == ESPER_OK) {
      char *p = (char *)base + ((char *)x - (char *)address);
      sim_kernel(s, 0, r.handle, p, 7 * MIB, SIM_WRITE);
      if (reached) {
        sim_stream_wait_stream(s, 1, far.handle, 0, r.handle);
        sim_kernel(s, 1, far.handle, p, 7 * MIB, SIM_READ);
        sim_stream_wait_stream(s, 0, r.handle, 1, far.handle);
      }
      EXPECT(esper_close_shared(core, base) == ESPER_OK);
    } else {
      EXPECT(!base && esper_last_error()[0]);
    }
    free(pages);
  }
  put(x);
  esper_unshare(core);
  EXPECT(esper_core_is_valid(core));
  esper_empty_cache(core, 0, NULL);
  put(kept);
  esper_unshare(core);
}

static void *get_as(const char *tag, size_t size, esper_stream stream)
{
  EXPECT(esper_tag_push(tag) == ESPER_OK);
  void *ptr = get(size, stream);
  EXPECT(esper_tag_pop() == ESPER_OK);
  return ptr;
}

/* False, after checking that nothing is lost: the driver refused. */
static bool wake(const char *tag)
{
  esper_status status = ESPER_OK;
  for (int tries = 0; tries < 3; tries++) {
    status = esper_wake(core, -1, tag ? &tag : NULL, tag ? 1 : 0, NULL);
    if (status == ESPER_OK)
      return true;
    EXPECT(esper_last_error()[0]);
    EXPECT(esper_core_is_valid(core));
  }
  return false;
}

/* Memory sleeps, some of it is freed meanwhile, and what woke is as it was. */
static void sleep_and_wake(esper_stream r, esper_stream a, esper_stream far)
{
  void *x = get_as("weights", 7 * MIB, r), *y = get_as("weights", 3 * MIB, a);
  void *z = get_as("weights", 3000, r), *v = get_as("weights", 5000, far);
  void *k = get_as("kv", 4 * MIB, r), *ptr;
  const char *weights = "weights", *kv = "kv";
  use(a, x, 0);
  esper_sleep_result result;
  bool woke = true;
  if (esper_sleep(core, -1, &weights, 1, ESPER_KEEP_HOST, &result) == ESPER_OK) {
    EXPECT(esper_tag_push(weights) == ESPER_OK);
    EXPECT(esper_malloc(core, 512, r, &ptr) != ESPER_OK);
    EXPECT(esper_tag_pop() == ESPER_OK);
    put(y);
    put(get(9 * MIB, a));
    EXPECT(esper_core_is_valid(core));
    woke = wake(weights);
  } else {
    EXPECT(esper_last_error()[0]);
    woke = wake(weights); /* on a device before the one that failed */
  }
  if (woke) {
    use(far, x, 0);
    use(a, z, 0);
    use(r, v, 0);
  }
  sim_allow_loss(s, 1);
  esper_status status = esper_sleep(core, 0, &kv, 1, ESPER_KEEP_NOTHING, NULL);
  sim_allow_loss(s, 0);
  if (status != ESPER_OK || wake(kv))
    use(a, k, 0);
  /* All of it, twice, and then for good. */
  for (int i = 0; i < 2; i++) {
    (void)esper_sleep(core, -1, NULL, 0, ESPER_KEEP_HOST, NULL);
    EXPECT(esper_core_is_valid(core));
    woke = wake(NULL);
  }
  if (woke)
    use(a, x, 0);
  put(x);
  put(z);
  put(v);
  put(k);
  esper_sleep_trim(core);
  EXPECT(esper_core_is_valid(core));
}

/* ---- the scenario ---------------------------------------------------------- */

static esper_stream new_stream(int device, unsigned flags)
{
  return (esper_stream){sim_stream_create(s, device), device, flags};
}

/* Memory that goes after its end, at once, late, and after the fence. */
static void behind_fences(esper_stream r, esper_stream a)
{
  if (esper_fence(core, 1) != ESPER_OK) {
    EXPECT(esper_last_error()[0]);
    return;
  }
  void *x = get(MIB, r), *y = get(3 * MIB, r), *z = get(2 * MIB, a);
  use(a, x, 0);
  use_at_free(a, y);
  put(x);
  put(y);
  sim_run_stream(s, 0, r.handle, 2);
  void *u = get(512, r);
  put(get((size_t)CAPACITY * MIB, r)); /* too much, unless all is given back first */
  put(z);
  sim_device_synchronize(s, 0);
  put(get(MIB, a));
  EXPECT(esper_fence(core, 0) == ESPER_OK);
  put(u);
  EXPECT(esper_core_is_valid(core));
}

static void scenario(void)
{
  const unsigned immortal = ESPER_STREAM_IMMORTAL;
  esper_stream r = new_stream(0, immortal), a = new_stream(0, immortal),
               b = new_stream(0, immortal), far = new_stream(1, immortal),
               mortal = new_stream(0, 0), legacy = {NULL, 0, immortal};

  /* Uses of every kind, of blocks of several streams and devices. */
  void *x = get(12 * MIB, r), *y = get(9 * MIB, r), *z = get(9 * MIB, r);
  void *u = get(5000, mortal), *v = get(700000, legacy), *f = get(MIB, far);
  use(a, x, 0);
  use(b, x, ESPER_USE_UNTIL_FREE);
  use_event(a, y);
  use_at_free(b, y);
  use_at_free(far, z);
  use(far, v, 0);
  use(a, f, 0);
  use_at_free(mortal, v);
  use_by_all(a, u);
  put(x);
  put(y);
  put(u);
  put(f);
  EXPECT(esper_core_is_valid(core));

  /* Reuse: growth up to the limit, loans, host waits. */
  void *w[8];
  for (int i = 0; i < 8; i++)
    w[i] = get((size_t)(8 + i) * MIB, i % 2 ? r : b);
  for (int i = 0; i < 8; i++)
    use(i % 2 ? a : r, w[i], 0);
  for (int i = 0; i < 8; i += 2)
    put(w[i]);
  sim_run_stream(s, 0, r.handle, 3);
  esper_retire(core, 0);
  for (int i = 0; i < 8; i += 2)
    w[i] = get((size_t)(8 + i) * MIB, a);
  for (int i = 0; i < 8; i++)
    put(w[i]);
  put(get(40 * MIB, r));
  put(get(60 * MIB, b));
  put(get((size_t)CAPACITY * 2 * MIB, b)); /* too much */
  EXPECT(esper_core_is_valid(core));

  behind_fences(r, a);

  /* Mapped segments: pages move where no free block is large enough, to a
   * hole between free blocks and to the end, and go back. */
  void *pieces[10];
  for (int i = 0; i < 10; i++)
    pieces[i] = get(5 * MIB, r);
  for (int i = 0; i < 10; i += 2)
    put(pieces[i]);
  sim_device_synchronize(s, 0);
  put(get(12 * MIB, b));
  put(get(13 * MIB, r));
  esper_empty_cache(core, 0, NULL);
  void *apart = get(8 * MIB, r);
  for (int i = 1; i < 10; i += 2)
    put(pieces[i]);
  put(get(30 * MIB, r));
  put(apart);
  EXPECT(esper_core_is_valid(core));

  share(r, far);
  sleep_and_wake(r, a, far);

  /* A stream goes, its handle comes back; what it reads is held. */
  void *m = get(3 * MIB, r);
  use_at_free(mortal, m);
  sim_stream_destroy(s, 0, mortal.handle);
  put(m);
  put(v);
  mortal = new_stream(0, 0);
  put(get(2000, mortal));
  m = get(2 * MIB, r);
  use_at_free(mortal, m);
  put(m);                 /* held: nobody presents the stream */
  put(get(3000, mortal)); /* it presents itself */

  /* A capture that the core was not told of; it may have met the stream. */
  esper_stream c = new_stream(0, immortal);
  void *outside = get(MIB, r);
  bool known = esper_record_use(core, NULL, 0, c, 0, NULL) == ESPER_OK;
  sim_capture_begin(s, 0, c.handle);
  put(get(100000, c));
  void *inside = get(100000, c);
  const void *p = outside;
  if (outside)
    esper_record_use(core, &p, 1, c, 0, NULL);
  put(z);
  put(outside);
  esper_empty_cache(core, 0, NULL);
  end_and_launch(c, c, known);
  put(inside);

  esper_stream e = new_stream(0, immortal);
  known &= esper_record_use(core, NULL, 0, e, 0, NULL) == ESPER_OK;
  pool_capture(c, e, known);
  esper_stream d = new_stream(0, immortal);
  known &= esper_record_use(core, NULL, 0, d, 0, NULL) == ESPER_OK;
  nested_captures(c, d, e, known);
  range_in_pool((esper_stream[]){c, d});

  esper_empty_cache(core, 0, NULL);

  /* The rest of the interface. */
  size_t free_bytes, total, largest;
  esper_stats stats;
  esper_counters counters;
  esper_pool *pool;
  for (int i = 0; i < DEVICES; i++) {
    esper_memory_info(core, i, &free_bytes, &total);
    esper_largest_available(core, i, &largest);
    esper_get_stats(core, i, &stats);
    esper_get_counters(core, i, &counters);
    esper_set_memory_fraction(core, i, 0.5);
    esper_set_memory_fraction(core, i, 1);
    if (esper_pool_create(core, i, 1, 2, &pool) == ESPER_OK) {
      void *ptr;
      esper_stream st = i ? far : r;
      if (esper_malloc_from(core, pool, 4096, st, &ptr) == ESPER_OK)
        EXPECT(esper_free(core, ptr) == ESPER_OK);
      esper_empty_cache(core, i, pool);
    }
    esper_empty_cache(core, i, NULL);
  }
  EXPECT(esper_core_is_valid(core));
}

/* ---- one run ---------------------------------------------------------------- */

static void no_fault(sim_call call)
{
  sim_fail_call(s, call, 0, ESPER_OK);
}

static void begin_device(sim_completion completion, uint64_t seed)
{
  sim_options options = {.devices = DEVICES,
                         .capacity = CAPACITY * MIB,
                         .virtual_memory = mapped,
                         .oracle = SIM_ORACLE_KNOWN,
                         .completion = completion,
                         .seed = seed};
  s = sim_create(&options);
  EXPECT(s);
  sim_on_failure(s, oracle_failed, NULL);
  block_count = 0;
}

static void put_all(void)
{
  while (block_count)
    put(blocks[0].ptr);
}

/* All the memory can be had again. What a capture was given stays its own. */
static void check_usable(void)
{
  void *ptr;
  esper_unshare(core);
  for (int d = 0; d < DEVICES; d++)
    if (!has_failed(d))
      EXPECT(esper_wake(core, d, NULL, 0, NULL) == ESPER_OK);
  for (int d = 0; d < DEVICES; d++) {
    EXPECT(sim_device_synchronize(s, d) == ESPER_OK);
    EXPECT(esper_empty_cache(core, d, NULL) == ESPER_OK);
  }
  for (int d = 0; d < DEVICES; d++) {
    esper_stream stream = new_stream(d, 0);
    if (has_failed(d)) {
      EXPECT(esper_malloc(core, MIB, stream, &ptr) == ESPER_DEVICE_ERROR && !ptr);
      EXPECT(strstr(esper_last_error(), "has failed"));
      EXPECT(esper_wake(core, d, NULL, 0, NULL) == ESPER_DEVICE_ERROR);
      continue;
    }
    EXPECT(esper_malloc(core, (CAPACITY - 8) * MIB, stream, &ptr) == ESPER_OK);
    sim_owner_begin(s, ptr, (CAPACITY - 8) * MIB, d, stream.handle);
    sim_owner_end(s, ptr);
    EXPECT(esper_free(core, ptr) == ESPER_OK);
  }
}

static void check_nothing_left(uint64_t refused_in_destroy)
{
  size_t left = 0;
  for (int d = 0; d < DEVICES; d++) {
    sim_alive alive;
    sim_count_alive(s, d, &alive);
    left += alive.allocations + alive.events + alive.streams + alive.ranges + alive.pages +
            alive.mappings + alive.names + alive.host_blocks;
  }
  /* What the driver would not take back is the driver's. */
  EXPECT(left <= 2 * refused_in_destroy); /* a mapping stays in its range */
}

/* Whether the driver keeps memory that way, or leaves a copy undone. */
static bool may_fail(sim_call call, esper_status status)
{
  return status != ESPER_OUT_OF_MEMORY &&
         (call == SIM_CALL_memory_free || call == SIM_CALL_page_unmap ||
          call == SIM_CALL_page_release || call == SIM_CALL_range_free ||
          call == SIM_CALL_host_free || call == SIM_CALL_copy_to_host ||
          call == SIM_CALL_copy_to_device || call == SIM_CALL_memory_zero ||
          call == SIM_CALL_event_synchronize || call == SIM_CALL_device_synchronize);
}

/* False: the fault was not reached. */
static bool run(sim_call call, uint64_t nth, esper_status status, bool sticky,
                sim_completion completion)
{
  snprintf(situation, sizeof situation, "%s number %llu%s answered %s, %s", sim_call_name(call),
           (unsigned long long)nth, sticky ? " and on" : "", esper_status_name(status),
           mapped ? "mapped" : "classic");
  begin_device(completion, nth);
  shut_down = status == ESPER_SHUT_DOWN;
  if (sticky)
    sim_fail_calls_from(s, call, nth, status);
  else
    sim_fail_call(s, call, nth, status);
  if (esper_core_create(sim_driver(s), &CONFIG, &core) != ESPER_OK) {
    EXPECT(!core && sim_faults(s) > 0);
    sim_destroy(s);
    return true;
  }
  if (completion == SIM_SEEDED)
    core_set_pages_moved(core, 256); /* slack before moved pages */
  scenario();
  if (sticky)
    no_fault(call);
  put_all();
  bool reached = sim_faults(s) > 0;
  if (shut_down && reached) { /* the process is ending: be quiet */
    void *ptr;
    esper_stream stream = new_stream(0, 0);
    uint64_t calls = sim_calls(s, SIM_CALL_any);
    EXPECT(esper_malloc(core, 512, stream, &ptr) != ESPER_OK && !ptr);
    EXPECT(esper_free(core, NULL) == ESPER_OK);
    EXPECT(sim_calls(s, SIM_CALL_any) == calls); /* it is not asked again */
  } else if (reached || sticky) {
    check_usable();
  }
  EXPECT(esper_core_is_valid(core));
  uint64_t before = sim_faults(s);
  bool failed = has_failed(0) || has_failed(1);
  EXPECT(!failed || shut_down || may_fail(call, status));
  esper_core_destroy(core);
  uint64_t refused = sim_faults(s) - before;
  failed |= refused && may_fail(call, status);
  if (!failed && !(shut_down && sim_faults(s)))
    check_nothing_left(refused);
  reached = sim_faults(s) > 0;
  sim_destroy(s);
  return reached;
}

/* Memory of the driver is the only thing that it can be short of. */
static bool is_plausible(sim_call call, esper_status status)
{
  switch (status) {
  case ESPER_OUT_OF_MEMORY:
    return call == SIM_CALL_memory_alloc || call == SIM_CALL_page_create ||
           call == SIM_CALL_page_map || call == SIM_CALL_range_reserve ||
           call == SIM_CALL_host_alloc || call == SIM_CALL_event_create ||
           call == SIM_CALL_stream_create;
  case ESPER_CAPTURING:
    return call == SIM_CALL_device_synchronize || call == SIM_CALL_event_record_all ||
           call == SIM_CALL_event_query || call == SIM_CALL_stream_wait ||
           call == SIM_CALL_event_record || call == SIM_CALL_event_synchronize ||
           call == SIM_CALL_event_wait;
  case ESPER_NOT_READY: return call == SIM_CALL_event_query || call == SIM_CALL_event_wait;
  case ESPER_UNSUPPORTED:
    return call == SIM_CALL_event_record_all || call == SIM_CALL_stream_id ||
           call == SIM_CALL_page_granularity || call == SIM_CALL_range_reserve ||
           call == SIM_CALL_peer_check || call == SIM_CALL_page_export ||
           call == SIM_CALL_page_import || call == SIM_CALL_capture_tails ||
           call == SIM_CALL_capture_before;
  case ESPER_INVALID:
    return call == SIM_CALL_page_import || call == SIM_CALL_capture_tails ||
           call == SIM_CALL_capture_before;
  default: return true;
  }
}

/* From one failing call of a function to the next. */
static uint64_t fault_step(void)
{
  const char *given = getenv("ESPER_FAULT_STEP");
  uint64_t step = given ? strtoull(given, NULL, 10) : 1;
  return step ? step : 1;
}

static void walk(esper_status status, bool sticky)
{
  static const sim_completion COMPLETIONS[] = {SIM_WHEN_TOLD, SIM_SEEDED, SIM_AT_ONCE};
  const uint64_t step = fault_step();
  uint64_t runs = 0;
  for (int c = 0; c < SIM_CALL_COUNT; c++) {
    sim_call call = (sim_call)c;
    if (!is_plausible(call, status))
      continue;
    for (int k = 0; k < 6; k++) {
      mapped = k >= 3;
      runs++;
      for (uint64_t nth = 1; run(call, nth, status, sticky, COMPLETIONS[k % 3]); nth += step)
        runs++;
    }
  }
  printf("  %llu runs\n", (unsigned long long)runs);
}

#define WALK(name, status, sticky) \
  TEST(name)                       \
  {                                \
    walk(status, sticky);          \
  }

WALK(every_call_may_fail, ESPER_DEVICE_ERROR, false)
WALK(every_call_may_fail_for_good, ESPER_DEVICE_ERROR, true)
WALK(the_driver_may_run_out_of_memory, ESPER_OUT_OF_MEMORY, false)
WALK(the_driver_may_be_out_of_memory_for_good, ESPER_OUT_OF_MEMORY, true)
WALK(captures_may_be_in_the_way, ESPER_CAPTURING, false)
WALK(captures_may_be_in_the_way_for_good, ESPER_CAPTURING, true)
WALK(captures_may_end_at_any_time, ESPER_INVALID, false)
WALK(functions_may_be_missing, ESPER_UNSUPPORTED, true)
WALK(events_may_take_their_time, ESPER_NOT_READY, false)
WALK(the_driver_may_go_at_any_time, ESPER_SHUT_DOWN, false)

/* Two calls of one sleep and wake fail: call number `first` of a function, and call number `second`
 * of all. False: the first was not reached. */
static bool sleep_with(sim_call call, uint64_t first, uint64_t second, uint64_t *calls)
{
  mapped = true;
  shut_down = false;
  snprintf(situation, sizeof situation, "%s number %llu and call number %llu of all failed",
           sim_call_name(call), (unsigned long long)first, (unsigned long long)second);
  begin_device(second % 2 ? SIM_WHEN_TOLD : SIM_AT_ONCE, 0);
  EXPECT(esper_core_create(sim_driver(s), &CONFIG, &core) == ESPER_OK);
  esper_stream r = new_stream(0, ESPER_STREAM_IMMORTAL), far = new_stream(1, ESPER_STREAM_IMMORTAL);
  sim_fail_call(s, call, first, ESPER_DEVICE_ERROR);
  sim_fail_call(s, SIM_CALL_any, second, ESPER_DEVICE_ERROR);
  void *x = get_as("weights", 7 * MIB, r), *y = get_as("weights", 3000, far);
  (void)esper_sleep(core, -1, NULL, 0, ESPER_KEEP_HOST, NULL);
  EXPECT(esper_core_is_valid(core));
  put(y);
  if (wake(NULL) && x && !has_failed(0))
    sim_kernel(s, 0, r.handle, x, 7 * MIB, SIM_READ);
  put(x);
  *calls = sim_calls(s, SIM_CALL_any);
  bool reached = sim_faults(s) > 1 || (sim_faults(s) && second > *calls);
  no_fault(call);
  no_fault(SIM_CALL_any);
  put_all();
  check_usable();
  EXPECT(esper_core_is_valid(core));
  bool failed = has_failed(0) || has_failed(1);
  esper_core_destroy(core);
  if (!failed)
    check_nothing_left(1); /* a stream got no id, and then no end */
  sim_destroy(s);
  return reached;
}

TEST(two_calls_of_a_sleep_and_a_wake_may_fail)
{
  const uint64_t step = fault_step();
  uint64_t runs = 0;
  for (int c = 0; c < SIM_CALL_COUNT; c++)
    for (uint64_t first = 1;; first += step) {
      uint64_t calls = 1;
      bool reached = false;
      for (uint64_t second = 1; second <= calls; second += step, runs++)
        reached |= sleep_with((sim_call)c, first, second, &calls);
      if (!reached)
        break;
    }
  printf("  %llu runs\n", (unsigned long long)runs);
}

/* The scenario is worth something only if it asks every function that the core
 * ever asks. */
TEST(the_scenario_calls_everything)
{
  strcpy(situation, "without a fault");
  uint64_t calls[SIM_CALL_COUNT] = {0};
  for (int kind = 0; kind < 2; kind++) {
    mapped = kind;
    begin_device(SIM_WHEN_TOLD, 0);
    CHECK_OK(esper_core_create(sim_driver(s), &CONFIG, &core));
    scenario();
    put_all();
    esper_core_destroy(core);
    for (int i = 0; i < SIM_CALL_COUNT; i++)
      calls[i] += sim_calls(s, (sim_call)i);
    sim_destroy(s);
  }
  for (int i = 0; esper_driver_call_name(i); i++) {
    int call = 0;
    while (call < SIM_CALL_COUNT &&
           strcmp(sim_call_name((sim_call)call), esper_driver_call_name(i)))
      call++;
    CHECK(call < SIM_CALL_COUNT);
    if (calls[call] == 0)
      check_failed(__FILE__, __LINE__, "%s is never called", esper_driver_call_name(i));
  }
}
