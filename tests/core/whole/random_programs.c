/* Seeded random programs over the simulated device, with its oracle on.
 *
 * random_programs [--seed S] [--operations N] [--threads T] [--programs P]
 *
 * Each program draws a machine, a configuration, and then operations. It allocates memory, uses it
 * on its own and on other streams, marks it in every possible way and frees it. It destroys and
 * makes streams, begins captures without telling the core or into a private pool, replays them,
 * empties caches, changes limits and lets time pass. The programs are correct: kernels wait for the
 * data they read, and marks come after the last read. So whatever the oracle finds is a mistake of
 * the core.
 *
 * Some streams wait for others before those ask for memory, and are the first to use it: all that
 * the others were given is behind them.
 *
 * Programs run one after another until N operations are done, each with the next seed. A failure
 * prints the seed of its program; --seed S --programs 1 runs only that one. With more than one
 * thread the schedule differs from run to run, so a seed only makes a failure likely again. */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/base/core.h"
#include "core/base/monotonic.h"
#include "core/order/device.h"
#include "draw.h"
#include "esper_sleep.h"
#include "world.h"

#ifdef ESPER_RULE_SWITCHES
#include "core/base/rules.h"
#endif

enum {
  MOST_STREAMS = 12, /* of a thread */
  MOST_BLOCKS = 192,
  MOST_LIST = 6,
  MOST_CAPTURES = 4, /* of a program: what they hold is never given back */
  POOL_ID = 7,       /* the first half of pools' */
};

/* As in core/api/testing.h, which includes names that would clash. */
void core_set_pages_moved(esper_core *core, uint64_t pages);

typedef struct stream {
  esper_stream es;
  bool alive;
  bool capturing;
  bool joined;  /* was in the capture, and rests until it ends */
  bool stalled; /* waits for a flag that is not raised yet */
  bool special; /* legacy or per-thread: not ours to destroy or capture */
} stream;

typedef struct block {
  char *ptr;
  size_t size;
  int device;
  int owner;        /* place of its stream; -1: that is gone */
  uint64_t at_free; /* bit i: a use on stream i until the free, which may read on */
  bool after_all;   /* any stream of the device may read on */
  bool pinned;      /* read by the graph */
  bool captured;    /* handed out, or read, in a capture */
  uint64_t capture; /* which, by number */
} block;

typedef struct program program;

typedef struct thread { /* of one program */
  program *p;
  uint64_t random;
  stream streams[MOST_STREAMS];
  int stream_count;
  block blocks[MOST_BLOCKS];
  int block_count;
  int capturing; /* place of the stream; -1: none */
  sim_graph *graph;
  int graph_device;
  uint64_t captures, unannounced;
  uint64_t pool;            /* of the capture that goes on; 0: none */
  uint64_t graphs_pool;     /* of the graph */
  int phases[2];            /* of do_pool_phase, on each device: references */
  esper_pool *own_pools[2]; /* of each device: they come and go */
  uint64_t own_pool_ids[2];
  int ran_out_on; /* device; -1: none since */
  int stalled;    /* place of the stream; -1: none */
  bool has_stalled;
  int tag;     /* of what it allocates, a place in TAG_NAMES; -1: any */
  int tag_now; /* of its last malloc */
  uint64_t done;
} thread;

/* Of a device. */
typedef struct amount {
  int64_t bytes, blocks;
} amount;

/* "": none. */
static const char *const TAG_NAMES[] = {"", "weights", "kv"};

struct program {
  uint64_t seed, operations;
  int threads, devices;
  thread *all;
  sim *s;
  esper_core *core;
  esper_pool *pools[2];      /* of each device, for all threads and to the end */
  _Atomic uint64_t pool_ids; /* second halves */
  bool captures, slow_time, faults, fatal, mapped, classic_pools, tags;
  size_t capacity, max_split;
  pthread_mutex_t shelf_lock; /* blocks that go from thread to thread */
  block shelf[16];
  int shelved;
  atomic_bool shared; /* pages, and some may still be open */
  _Atomic uint64_t mallocs, handed_out, ran_out;
  bool virtual_memory;
  amount live[2], peak[2]; /* of one thread: of each device, since its peaks were reset */
};

static _Thread_local thread *current;

static _Noreturn void fail(const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "random_programs: ");
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (current)
    fprintf(stderr,
            "\nafter %llu operations; again: random_programs --seed %llu "
            "--programs 1 --threads %d\n",
            (unsigned long long)current->done, (unsigned long long)current->p->seed,
            current->p->threads);
  abort();
}

static void oracle_failed(void *context, const char *report)
{
  (void)context;
  fail("%s", report);
}

static void must(esper_status status, const char *what)
{
  if (status != ESPER_OK)
    fail("%s: %s: %s", what, esper_status_name(status), esper_last_error());
}

#define MUST(call) must(call, #call)

/* The same where the driver may have been told to fail. A call that was refused
 * has done nothing, so the program, which needs it done, asks again. */
#define MUST_AT_LAST(call)                                           \
  do {                                                               \
    esper_status refused = (call);                                   \
    for (int times = 0; times < 4 && refused != ESPER_OK; times++) { \
      if (!current->p->faults)                                       \
        break;                                                       \
      refused = (call);                                              \
    }                                                                \
    must(refused, #call);                                            \
  } while (0)

/* ---- drawing ------------------------------------------------------------ */

static int draw(thread *t, int below)
{
  return (int)draw_below(&t->random, (uint64_t)below);
}

static bool chance(thread *t, int in)
{
  return draw(t, in) == 0;
}

/* Sizes at which the allocator behaves differently, and those between. */
static size_t draw_size(thread *t)
{
  static const size_t EDGES[] = {1, 512, 513, 64 << 10, 1 << 20, (1 << 20) + 1, 2 << 20, 10 << 20};
  switch (draw(t, 8)) {
  case 0: return EDGES[draw(t, 8)];
  case 1: return (size_t)1 + draw64(&t->random) % (16 << 20);
  case 2:
  case 3: return (size_t)1 + draw64(&t->random) % (2 << 20);
  default: return (size_t)1 + draw64(&t->random) % (64 << 10);
  }
}

static block *draw_block(thread *t)
{
  return t->block_count ? &t->blocks[draw(t, t->block_count)] : NULL;
}

static int draw_stream(thread *t)
{
  for (int tries = 0; tries < 8; tries++) {
    int i = draw(t, t->stream_count);
    if (t->streams[i].alive && !t->streams[i].joined)
      return i;
  }
  return 1; /* never destroyed, nor captured */
}

static bool is_usable(const stream *st)
{
  return st->alive && !st->capturing && !st->stalled;
}

/* ---- the program's own order -------------------------------------------- */

/* Work on `reader` may now read what `owner` wrote. */
static bool order(thread *t, int reader, int owner)
{
  if (reader == owner)
    return true;
  const stream *r = &t->streams[reader], *o = &t->streams[owner];
  if (!is_usable(r) || !is_usable(o))
    return false;
  sim_stream_wait_stream(t->p->s, r->es.device, r->es.handle, o->es.device, o->es.handle);
  return true;
}

static void kernel(thread *t, int on, const block *b)
{
  const esper_stream es = t->streams[on].es;
  size_t begin = 0, size = b->size;
  if (chance(t, 3)) { /* a part */
    begin = draw64(&t->random) % b->size;
    size = 1 + draw64(&t->random) % (b->size - begin);
  }
  /* As PyTorch does before the first access; others map pages meanwhile. */
  if (es.device != b->device)
    MUST_AT_LAST(esper_add_peer(t->p->core, b->device, es.device));
  sim_kernel(t->p->s, es.device, es.handle, b->ptr + begin, size,
             chance(t, 2) ? SIM_READ : SIM_WRITE);
}

/* A kernel on another stream. False: the program could not order it. */
static bool read_elsewhere(thread *t, int on, const block *b)
{
  if (b->owner < 0 || on == b->owner || !is_usable(&t->streams[on]) || !order(t, on, b->owner))
    return false;
  kernel(t, on, b);
  return true;
}

/* ---- operations --------------------------------------------------------- */

/* Before it gives up the core waits for the device and gives back all that is
 * wholly free, but what private pools keep. So if memory is there now, it was
 * there then. A capture may forbid the wait. */
static void check_that_memory_ran_out(thread *t, size_t size, uint64_t pool)
{
  program *p = t->p;
  if (t->stalled >= 0 || p->faults || p->captures || p->threads > 1)
    return;
  esper_failure f;
  esper_snapshot snapshot;
  esper_get_failure(&f);
  if (size > SIZE_MAX / 4)
    return;
  size_t rounded = (size + 511) / 512 * 512;
  bool pages = p->mapped && (!pool || !p->classic_pools);
  size_t segment = pages                ? (rounded + 2 * MIB - 1) / (2 * MIB) * 2 * MIB
                   : rounded <= MIB     ? 2 * MIB
                   : rounded < 10 * MIB ? 20 * MIB
                                        : (rounded + 2 * MIB - 1) / (2 * MIB) * 2 * MIB;
  if (f.device_free >= segment && f.reserved + segment <= f.limit)
    fail("out of memory, with %zu bytes on the device for a segment of %zu", f.device_free,
         segment);
  MUST(esper_snapshot_take(p->core, f.device, &snapshot));
  for (size_t i = 0; i < snapshot.segment_count; i++) {
    const esper_segment_entry *g = &snapshot.segments[i];
    const esper_block_entry *b = &snapshot.blocks[g->first_block];
    /* With tags it may have to go back first, for which the host may have had to wait. */
    if (g->block_count == 1 && b->state == ESPER_BLOCK_INACTIVE && !g->pool[0] && !p->tags)
      fail("out of memory, with a wholly free segment of %zu bytes", g->size);
    for (size_t k = 0; k < g->block_count; k++)
      if (g->pool[1] == pool && g->large == (rounded > MIB) && !p->max_split &&
          !strcmp(g->tag, TAG_NAMES[t->tag_now]) && b[k].state == ESPER_BLOCK_INACTIVE &&
          b[k].size >= rounded)
        fail("out of memory for %zu bytes, with a free block of %zu", rounded, b[k].size);
  }
  esper_snapshot_free(&snapshot);
}

/* Under a tag: a place in TAG_NAMES. */
static esper_status malloc_as(const thread *t, int tag, esper_pool *pool, size_t size,
                              esper_stream es, void **ptr)
{
  if (tag)
    MUST(esper_tag_push(TAG_NAMES[tag]));
  esper_status status = pool ? esper_malloc_from(t->p->core, pool, size, es, ptr)
                             : esper_malloc(t->p->core, size, es, ptr);
  if (tag)
    MUST(esper_tag_pop());
  return status;
}

static void count(program *p, const block *b, int by)
{
  amount *live = &p->live[b->device], *peak = &p->peak[b->device];
  if (p->threads > 1)
    return;
  live->bytes += by * (int64_t)b->size;
  live->blocks += by;
  if (live->bytes > peak->bytes)
    peak->bytes = live->bytes;
  if (live->blocks > peak->blocks)
    peak->blocks = live->blocks;
}

/* The core gave memory to the stream at place `on`. */
static block *new_block(thread *t, void *ptr, int on)
{
  esper_block_info info;
  esper_stream es = t->streams[on].es;
  MUST(esper_find_block(t->p->core, ptr, &info));
  sim_owner_begin(t->p->s, ptr, info.size, es.device, es.handle);
  block *b = &t->blocks[t->block_count++];
  *b = (block){.ptr = ptr,
               .size = info.size,
               .device = es.device,
               .owner = on,
               .captured = t->streams[on].capturing,
               .capture = t->captures};
  count(t->p, b, 1);
  return b;
}

/* NULL: it got none. */
static block *malloc_only(thread *t, int on)
{
  program *p = t->p;
  esper_stream es = t->streams[on].es;
  size_t size = draw_size(t);
  void *ptr = NULL;
  if (t->block_count == MOST_BLOCKS)
    return NULL;
  if (chance(t, 300))
    size = chance(t, 2) ? SIZE_MAX - draw64(&t->random) % 4096 : 0;
  /* While somebody waits for us to go on, no malloc may need the host to wait
   * for him: stay far from the limit. */
  if (t->stalled >= 0 && size > MIB)
    size %= MIB;
  esper_pool *pool = NULL;
  uint64_t pool_id = 0;
  if (chance(t, 8)) {
    /* What a graph touches stays, and nothing says when this one goes. */
    bool own = !t->streams[on].capturing && chance(t, 2);
    pool = own ? t->own_pools[es.device] : p->pools[es.device];
    pool_id = own ? t->own_pool_ids[es.device] : 1 + (uint64_t)es.device;
    /* One that stays keeps what it got: it is not to have all there is. */
    if (!own && p->capacity <= 100 * MIB && size > MIB)
      size %= MIB;
  }
  if (pool && t->streams[on].capturing)
    t->unannounced++;
  t->tag_now = t->tag >= 0 ? t->tag : p->tags ? draw(t, 3) : 0;
  esper_status status = malloc_as(t, t->tag_now, pool, size, es, &ptr);
  /* Work that was stalled may have completed meanwhile. */
  if (status == ESPER_OUT_OF_MEMORY && t->has_stalled)
    status = malloc_as(t, t->tag_now, pool, size, es, &ptr);
  p->mallocs++;
  if (status == ESPER_OUT_OF_MEMORY) {
    t->ran_out_on = es.device;
    esper_failure failure;
    esper_get_failure(&failure);
    if (failure.requested != size || failure.device != es.device)
      fail("the failure's statistics belong to another request");
    p->ran_out++;
    check_that_memory_ran_out(t, size, pool_id);
    /* Pools that stay may hold all that the fraction allows, for the rest of the
     * program: who runs into that raises it, like a user. */
    if (failure.private_pools + failure.segment > failure.limit && failure.requested < SIZE_MAX / 4)
      MUST_AT_LAST(esper_set_memory_fraction(p->core, es.device, 1));
    return NULL;
  }
  if (p->faults && status != ESPER_OK)
    return NULL;
  MUST(status);
  if (size == 0) {
    if (ptr)
      fail("zero bytes gave %p", ptr);
    return NULL;
  }
  esper_block_info info;
  MUST(esper_find_block(p->core, ptr, &info));
  if (!info.live || info.address != ptr || info.size < size || info.requested != size ||
      info.device != es.device)
    fail("find_block tells otherwise than malloc");
  p->handed_out++;
  return new_block(t, ptr, on);
}

static void malloc_on(thread *t, int on)
{
  const block *b = malloc_only(t, on);
  if (b && !chance(t, 4) && !t->streams[on].stalled)
    kernel(t, on, b);
}

static void do_malloc(thread *t)
{
  malloc_on(t, draw_stream(t));
}

static void free_at(thread *t, int i)
{
  block b = t->blocks[i];
  t->blocks[i] = t->blocks[--t->block_count];
  count(t->p, &b, -1);
  sim_owner_end(t->p->s, b.ptr);
  MUST(esper_free(t->p->core, b.ptr));
}

static void do_free(thread *t)
{
  block *b = draw_block(t);
  if (!b || b->pinned)
    return;
  if (b->captured && t->capturing >= 0 && chance(t, 2))
    return;
  if (!b->after_all && !b->captured && t->stalled < 0 && chance(t, 24)) {
    /* Readers that nobody names. */
    int on = draw_stream(t);
    if (t->streams[on].es.device == b->device)
      read_elsewhere(t, on, b);
    MUST_AT_LAST(esper_free_after_all(t->p->core, b->ptr));
  }
  free_at(t, (int)(b - t->blocks));
}

static void do_time(thread *t);

/* A reader that nobody names, for which the owner waits after the free: it asks for no memory
 * before that, but others do. */
static void do_wait_after_free(thread *t)
{
  block *b = draw_block(t);
  if (!b || b->pinned || b->captured || b->owner < 0 || t->stalled >= 0)
    return;
  int owner = b->owner, reader = draw_stream(t);
  if (t->p->threads > 1 && owner <= 3) /* another thread asks for memory there */
    return;
  if (t->streams[owner].special || t->streams[owner].es.device != t->streams[reader].es.device ||
      t->streams[owner].es.device != b->device || !is_usable(&t->streams[owner]) ||
      !read_elsewhere(t, reader, b))
    return;
  free_at(t, (int)(b - t->blocks));
  for (int i = draw(t, 4); i > 0; i--) {
    int other = draw_stream(t);
    if (other != owner)
      malloc_on(t, other);
    if (chance(t, 3))
      do_free(t);
    if (chance(t, 3))
      do_time(t);
  }
  order(t, owner, reader);
}

static void do_own_kernel(thread *t)
{
  const block *b = draw_block(t);
  if (!b || b->owner < 0 || t->streams[b->owner].stalled)
    return;
  /* What a capture was given is for the capture; what came from outside may
   * be read in it only while it stays: see pin(). */
  if (b->captured != t->streams[b->owner].capturing)
    return;
  if (b->captured && b->capture != t->captures)
    return;
  kernel(t, b->owner, b);
}

/* An exact mark, or with a flag one until the free. */
static void mark(const thread *t, const void *ptr, esper_stream reader, unsigned flags)
{
  MUST_AT_LAST(esper_record_use(t->p->core, &ptr, 1, reader, flags, NULL));
}

/* Kernels over several blocks on one stream, then one mark for all. */
static void do_record_use(thread *t)
{
  const void *ptrs[MOST_LIST];
  size_t count = 0, marked = 0;
  int on = draw_stream(t), most = chance(t, 3) ? MOST_LIST : 1;
  for (int i = 0; i < most; i++) {
    const block *b = draw_block(t);
    if (!b || b->captured)
      continue;
    if (b->owner != on && !read_elsewhere(t, on, b))
      continue;
    ptrs[count++] = b->ptr + (chance(t, 2) ? draw64(&t->random) % b->size : 0);
  }
  if (!count && !chance(t, 16))
    return;
  MUST_AT_LAST(esper_record_use(t->p->core, ptrs, count, t->streams[on].es, 0, &marked));
  if (marked != count)
    fail("%zu of %zu marked", marked, count);
}

/* The same with an event of the program's, which is then used again. */
static void do_record_use_event(thread *t)
{
  sim *s = t->p->s;
  const block *b = draw_block(t);
  int on = draw_stream(t);
  if (!b || b->captured || !read_elsewhere(t, on, b))
    return;
  esper_stream es = t->streams[on].es;
  const void *ptr = b->ptr;
  size_t marked;
  void *event = sim_event_create(s, es.device);
  MUST(sim_event_record(s, es.device, event, es.handle));
  MUST_AT_LAST(esper_record_use_event(t->p->core, &ptr, 1, event, es.device, &marked));
  if (marked != 1)
    fail("a live block was not marked");
  if (chance(t, 2)) {
    esper_stream other = t->streams[0].es;
    if (other.device == es.device && !t->streams[0].capturing)
      sim_event_record(s, es.device, event, other.handle);
  }
  sim_event_destroy(s, es.device, event);
}

/* A use that lasts until the free: marked, or noted by an observer. */
static void use_until_free(thread *t, const void *ptr, esper_stream reader)
{
  switch (draw(t, 4)) {
  case 0: MUST_AT_LAST(esper_record_stream(t->p->core, ptr, reader)); break;
  case 1: MUST_AT_LAST(esper_note_use(t->p->core, &ptr, 1, reader)); break;
  default: mark(t, ptr, reader, ESPER_USE_UNTIL_FREE);
  }
}

static void do_record_stream(thread *t)
{
  block *b = draw_block(t);
  int on = draw_stream(t);
  if (!b || b->captured || b->owner < 0 || on == b->owner)
    return;
  use_until_free(t, b->ptr, t->streams[on].es);
  b->at_free |= (uint64_t)1 << on;
  if (chance(t, 2))
    read_elsewhere(t, on, b);
}

/* Reads that an earlier use until the free covers. */
static void do_read_on(thread *t)
{
  block *b = draw_block(t);
  if (!b || (!b->at_free && !b->after_all))
    return;
  for (int i = 0; i < t->stream_count; i++)
    if (b->after_all ? t->streams[i].es.device == b->device : (int)(b->at_free >> i & 1))
      read_elsewhere(t, i, b);
}

/* Whoever comes after all that the owner was given uses its new memory first, and says so. The
 * owner gets no work until then. */
static void use_first(thread *t, block *b, int user)
{
  esper_stream es = t->streams[user].es;
  kernel(t, user, b);
  switch (draw(t, 4)) {
  case 0: mark(t, b->ptr, es, 0); break;
  case 1: order(t, b->owner, user); break;
  default: use_until_free(t, b->ptr, es); b->at_free |= (uint64_t)1 << user;
  }
}

/* The user waits for the owner, or for one of its followers, or the host does; or the user will
 * wait for an event. */
static void do_wait_first(thread *t)
{
  sim *s = t->p->s;
  int owner = draw_stream(t), user = draw_stream(t), between = draw_stream(t);
  const stream *o = &t->streams[owner], *u = &t->streams[user];
  if (t->stalled >= 0 || owner == user || !is_usable(o) || !is_usable(u))
    return;
  void *event = chance(t, 4) ? sim_event_create(s, o->es.device) : NULL;
  if (event)
    MUST(sim_event_record(s, o->es.device, event, o->es.handle));
  else if (chance(t, 8))
    sim_stream_synchronize(s, o->es.device, o->es.handle);
  else if (!chance(t, 4) || !order(t, between, owner) || !order(t, user, between))
    order(t, user, owner);
  for (int i = 1 + draw(t, 4); i > 0; i--) {
    block *b = malloc_only(t, owner);
    if (event)
      MUST(sim_stream_wait(s, u->es.device, u->es.handle, event));
    if (b)
      use_first(t, b, user);
    if (b && chance(t, 2))
      free_at(t, (int)(b - t->blocks));
  }
  if (event)
    sim_event_destroy(s, o->es.device, event);
}

/* No mark at all: the owner waits for the reader, as programs did before. */
static void do_join_back(thread *t)
{
  const block *b = draw_block(t);
  int on = draw_stream(t);
  if (!b || b->captured || !read_elsewhere(t, on, b))
    return;
  order(t, b->owner, on);
}

static void do_free_after_all(thread *t)
{
  block *b = draw_block(t);
  if (!b || b->captured || b->owner < 0 || t->stalled >= 0)
    return;
  MUST_AT_LAST(esper_free_after_all(t->p->core, b->ptr));
  b->after_all = true;
}

/* ---- streams come and go ------------------------------------------------ */

static void forget_stream(thread *t, int gone)
{
  for (int i = 0; i < t->block_count; i++) {
    block *b = &t->blocks[i];
    if (b->owner == gone)
      b->owner = -1;
    b->at_free &= ~((uint64_t)1 << gone);
  }
}

static void do_recycle_stream(thread *t)
{
  int i = draw_stream(t);
  stream *st = &t->streams[i];
  if (st->special || st->es.flags & ESPER_STREAM_IMMORTAL || !is_usable(st))
    return;
  sim_stream_destroy(t->p->s, st->es.device, st->es.handle);
  st->alive = false;
  forget_stream(t, i);
  if (chance(t, 2)) /* its handle goes to somebody else meanwhile */
    for (int k = 0; k < t->stream_count; k++)
      if (!t->streams[k].alive && chance(t, 2)) {
        t->streams[k].es.handle = sim_stream_create(t->p->s, t->streams[k].es.device);
        t->streams[k].alive = true;
      }
  if (!st->alive) {
    st->es.handle = sim_stream_create(t->p->s, st->es.device);
    st->alive = true;
  }
}

/* ---- captures ------------------------------------------------------------ */

static void unpin(thread *t)
{
  for (int i = 0; i < t->block_count; i++)
    t->blocks[i].pinned = false;
}

static void drop_graph(thread *t)
{
  sim_graph_destroy(t->p->s, t->graph);
  t->graph = NULL;
  if (t->graphs_pool)
    MUST(esper_pool_release(t->p->core, t->graph_device, t->graphs_pool, 0));
  unpin(t);
}

/* Of a private pool: the streams that its thread is capturing. */
static int is_capturing(void *context, void *handle)
{
  const thread *t = context;
  if (current != t)
    return 0;
  for (int i = 0; i < t->stream_count; i++)
    if (t->streams[i].capturing && t->streams[i].es.handle == handle)
      return 1;
  return 0;
}

static void do_capture_begin(thread *t)
{
  int i = draw_stream(t);
  stream *st = &t->streams[i];
  if (!t->p->captures || t->capturing >= 0 || t->captures >= MOST_CAPTURES || t->stalled >= 0 ||
      i == 1 || st->special || !is_usable(st))
    return;
  if (t->p->threads > 1 && st->es.flags & ESPER_STREAM_IMMORTAL)
    return; /* others may just be recording on it, as nobody can help */
  if (t->graph)
    drop_graph(t);
  MUST_AT_LAST(esper_record_use(t->p->core, NULL, 0, st->es, 0, NULL));
  t->pool = chance(t, 2) ? 0 : 100 + (uint64_t)(t - t->p->all);
  if (t->pool)
    MUST(esper_pool_begin(t->p->core, st->es.device, t->pool, 0, is_capturing, t));
  else
    t->unannounced++;
  sim_capture_begin(t->p->s, st->es.device, st->es.handle);
  if (t->pool)
    sim_capture_group(t->p->s, st->es.device, st->es.handle, t->pool);
  st->capturing = true;
  t->capturing = i;
  t->captures++;
}

/* The graph reads a block from outside, which then must stay. */
static void pin(thread *t)
{
  block *b = draw_block(t);
  if (!b || b->captured || b->owner < 0)
    return;
  kernel(t, t->capturing, b);
  b->pinned = true;
  if (chance(t, 4)) /* a mark that no event can stand for */
    mark(t, b->ptr, t->streams[t->capturing].es, 0);
}

static block *draw_captured(thread *t, int a, int b)
{
  for (int tries = 0; tries < 8; tries++) {
    block *c = draw_block(t);
    if (c && c->captured && c->capture == t->captures && !c->pinned &&
        (c->owner == a || c->owner == b))
      return c;
  }
  return NULL;
}

static void mark_inside(thread *t, const void *ptr, esper_stream reader)
{
  if (chance(t, 4))
    mark(t, ptr, reader, 0);
  else
    use_until_free(t, ptr, reader);
}

/* Inside the capture a stream reads what another one owns, and says so; or the
 * owner waits for it. */
static void read_inside(thread *t, int a, int b)
{
  sim *s = t->p->s;
  block *c = draw_captured(t, a, b);
  if (!c)
    return;
  int on = c->owner == a ? b : a;
  esper_stream reader = t->streams[on].es, owner = t->streams[c->owner].es;
  sim_stream_wait_stream(s, reader.device, reader.handle, owner.device, owner.handle);
  kernel(t, on, c);
  if (chance(t, 3))
    sim_stream_wait_stream(s, owner.device, owner.handle, reader.device, reader.handle);
  else
    mark_inside(t, c->ptr, reader);
  if (chance(t, 2))
    free_at(t, (int)(c - t->blocks));
}

static bool can_join(const thread *t, int i)
{
  const stream *o = &t->streams[i], *st = &t->streams[t->capturing];
  return is_usable(o) && i != 1 && !o->special && o->es.device == st->es.device &&
         (t->p->threads == 1 || !(o->es.flags & ESPER_STREAM_IMMORTAL));
}

/* Of the streams in the capture one that is not `on`, but comes after all its nodes. */
static int follower_inside(thread *t, int on, const int *inside, int count)
{
  int user = inside[draw(t, count)];
  esper_stream first = t->streams[user].es, es = t->streams[on].es;
  if (user != on)
    sim_stream_wait_stream(t->p->s, first.device, first.handle, es.device, es.handle);
  return user;
}

/* A second stream joins, works on memory of its own and of the first, and comes
 * back. A third one may use it first. */
static void fork_and_join(thread *t)
{
  sim *s = t->p->s;
  stream *st = &t->streams[t->capturing];
  int other = draw_stream(t);
  stream *o = &t->streams[other];
  if (!can_join(t, other))
    return;
  sim_stream_wait_stream(s, o->es.device, o->es.handle, st->es.device, st->es.handle);
  o->capturing = true;
  int inside[3] = {t->capturing, other, draw_stream(t)}, count = 2;
  stream *third = &t->streams[inside[2]];
  if (can_join(t, inside[2])) {
    sim_stream_wait_stream(s, third->es.device, third->es.handle, o->es.device, o->es.handle);
    third->capturing = true;
    count++;
  }
  /* What is freed then fits what comes next. */
  size_t same = chance(t, 2) ? draw_size(t) : 0;
  for (int i = same ? 64 : 12; i > 0 && t->block_count < MOST_BLOCKS; i--) {
    void *ptr;
    if (chance(t, 3)) {
      read_inside(t, other, t->capturing);
      continue;
    }
    int on = chance(t, 2) ? other : t->capturing, user = on;
    esper_stream es = t->streams[on].es;
    if (chance(t, 2))
      user = follower_inside(t, on, inside, count);
    size_t size = same ? same : 1 + draw64(&t->random) % (64 << 10);
    if (esper_malloc(t->p->core, size, es, &ptr))
      continue;
    kernel(t, user, new_block(t, ptr, on));
    if (user != on)
      mark_inside(t, ptr, t->streams[user].es);
    if (chance(t, 2))
      free_at(t, t->block_count - 1);
  }
  if (chance(t, 2)) {
    /* An event of the capture, as if it were any other. */
    void *event = sim_event_create(s, o->es.device);
    MUST(sim_event_record(s, o->es.device, event, o->es.handle));
    const block *b = draw_block(t);
    const void *ptr = b ? b->ptr : NULL;
    if (b && !b->captured)
      MUST_AT_LAST(esper_record_use_event(t->p->core, &ptr, 1, event, o->es.device, NULL));
    sim_event_destroy(s, o->es.device, event);
  }
  sim_stream_wait_stream(s, st->es.device, st->es.handle, o->es.device, o->es.handle);
  if (count == 3) {
    sim_stream_wait_stream(s, st->es.device, st->es.handle, third->es.device, third->es.handle);
    third->joined = true;
  }
  /* Work it got from now on would not be joined. */
  o->joined = true;
  for (int i = 0; i < t->block_count; i++)
    if (t->blocks[i].captured && t->blocks[i].owner == other)
      t->blocks[i].owner = -1;
}

static void do_capture_end(thread *t)
{
  if (t->capturing < 0)
    return;
  stream *st = &t->streams[t->capturing];
  /* Whether a mortal stream is being captured nobody can ask later. */
  bool valid = sim_capture_is_valid(t->p->s, st->es.device, st->es.handle);
  bool immortal = st->es.flags & ESPER_STREAM_IMMORTAL;
  if (!valid && immortal)
    fail("somebody invalidated the capture");
  if (!valid || chance(t, 5)) {
    sim_capture_abort(t->p->s, st->es.device, st->es.handle);
  } else {
    t->graph = sim_capture_end(t->p->s, st->es.device, st->es.handle);
    /* With threads, a mortal stream's may be invalidated since we asked. */
    if (!t->graph && (immortal || t->p->threads == 1))
      fail("the capture was spoiled");
    t->graph_device = st->es.device;
  }
  if (t->pool) {
    MUST(esper_pool_end(t->p->core, st->es.device, t->pool, 0, NULL));
    if (!t->graph)
      MUST(esper_pool_release(t->p->core, st->es.device, t->pool, 0));
  }
  t->graphs_pool = t->pool;
  for (int i = 0; i < t->stream_count; i++)
    t->streams[i].capturing = t->streams[i].joined = false;
  if (!t->graph)
    unpin(t);
  t->capturing = -1;
}

static void do_capture_step(thread *t)
{
  if (t->capturing < 0) {
    do_capture_begin(t);
  } else if (chance(t, 4)) {
    pin(t);
  } else if (chance(t, 4)) {
    fork_and_join(t);
  } else if (chance(t, 6)) {
    do_capture_end(t);
  }
}

/* A replay reads the pinned blocks, so each is marked, all with one event. */
static void do_launch(thread *t)
{
  const void *ptrs[MOST_BLOCKS];
  size_t count = 0, marked;
  int on = draw_stream(t);
  const stream *st = &t->streams[on];
  if (!t->graph || !is_usable(st) || st->es.device != t->graph_device)
    return;
  for (int i = 0; i < t->block_count; i++)
    if (t->blocks[i].pinned) {
      if (t->blocks[i].owner < 0 || !order(t, on, t->blocks[i].owner))
        return;
      ptrs[count++] = t->blocks[i].ptr;
    }
  sim_graph_launch(t->p->s, t->graph, st->es.device, st->es.handle);
  MUST_AT_LAST(esper_record_use(t->p->core, ptrs, count, st->es, 0, &marked));
  if (marked != count)
    fail("%zu of %zu marked", marked, count);
}

/* ---- faults -------------------------------------------------------------- */

/* The driver is about to fail, some way into what it is asked next. */
static void do_fault(thread *t)
{
  static const sim_call CALLS[] = {
      SIM_CALL_event_query,      SIM_CALL_stream_wait,       SIM_CALL_event_record,
      SIM_CALL_event_create,     SIM_CALL_memory_alloc,      SIM_CALL_stream_id,
      SIM_CALL_stream_capture,   SIM_CALL_memory_info,       SIM_CALL_stream_create,
      SIM_CALL_event_record_all, SIM_CALL_capture_tails,     SIM_CALL_event_wait,
      SIM_CALL_capture_before,   SIM_CALL_page_create,       SIM_CALL_page_map,
      SIM_CALL_range_reserve,    SIM_CALL_page_access,       SIM_CALL_peer_check,
      SIM_CALL_page_export,      SIM_CALL_page_unexport,     SIM_CALL_page_import,
      SIM_CALL_host_alloc,       SIM_CALL_memory_free, /* from here on: see has_failed */
      SIM_CALL_page_unmap,       SIM_CALL_page_release,      SIM_CALL_range_free,
      SIM_CALL_host_free,        SIM_CALL_copy_to_host,      SIM_CALL_copy_to_device,
      SIM_CALL_memory_zero,      SIM_CALL_event_synchronize, SIM_CALL_device_synchronize,
  };
  enum { ALL = sizeof CALLS / sizeof *CALLS, FATAL = 10 };
  if (!t->p->faults || t->stalled >= 0)
    return;
  sim_call call = CALLS[draw(t, t->p->fatal ? ALL : ALL - FATAL)];
  bool runs_out = call == SIM_CALL_memory_alloc || call == SIM_CALL_page_create ||
                  call == SIM_CALL_event_create || call == SIM_CALL_stream_create;
  sim_fail_call(t->p->s, call, 1 + draw64(&t->random) % 6,
                runs_out && chance(t, 2) ? ESPER_OUT_OF_MEMORY : ESPER_DEVICE_ERROR);
}

/* A device that has failed serves no more (memory/failure.h), so the program ends. */
static bool has_failed(const program *p)
{
  bool failed = false;
  for (int d = 0; d < p->devices; d++)
    failed |= device_has_failed(&p->core->devices[d]);
  return failed;
}

static void no_more_faults(program *p)
{
  for (int call = 0; call < SIM_CALL_COUNT; call++)
    sim_fail_call(p->s, (sim_call)call, 0, ESPER_OK);
}

/* ---- work that waits for what is not yet enqueued ------------------------ */

/* A stream spins until another one raises a flag. What it reads is marked, and dropped; then the
 * other stream wants memory. Making it wait for the reader would hang the program, and so would a
 * host that waits for ever. */
static void do_stall(thread *t)
{
  sim *s = t->p->s;
  no_more_faults(t->p); /* an error could make the host wait */
  if (t->p->threads > 1 || t->stalled >= 0 || t->capturing >= 0)
    return;
  int on = draw_stream(t), by = draw_stream(t);
  stream *st = &t->streams[on];
  const stream *raiser = &t->streams[by];
  if (on == by || !is_usable(st) || !is_usable(raiser))
    return;
  block *read[4];
  int count = 0;
  for (int i = 0; i < 4; i++) {
    block *b = draw_block(t);
    bool again = !b || b->captured || b->pinned || b->owner < 0 || b->owner == on || b->at_free ||
                 b->after_all;
    for (int k = 0; k < count; k++)
      again |= read[k] == b;
    if (!again && order(t, on, b->owner))
      read[count++] = b;
  }
  for (int d = 0; d < t->p->devices; d++) {
    sim_set_capacity(s, d, (size_t)1 << 40);
    MUST_AT_LAST(esper_set_memory_fraction(t->p->core, d, 1));
  }
  sim_wait_flag(s, st->es.device, st->es.handle, 0);
  st->stalled = true;
  t->stalled = on;
  t->has_stalled = true;
  const void *ptrs[4];
  for (int i = 0; i < count; i++) {
    kernel(t, on, read[i]);
    ptrs[i] = read[i]->ptr;
    if (chance(t, 2))
      mark(t, ptrs[i], st->es, 0);
    else
      use_until_free(t, ptrs[i], st->es);
  }
  for (int i = 0; i < count; i++)
    for (int k = 0; k < t->block_count; k++)
      if (t->blocks[k].ptr == ptrs[i]) {
        free_at(t, k);
        break;
      }
  for (int i = 0; i < 12; i++) {
    do_malloc(t);
    if (chance(t, 2))
      do_free(t);
  }
  sim_raise_flag(s, raiser->es.device, raiser->es.handle, 0);
  sim_run_all(s);
  if (sim_pending_all(s))
    fail("stream %d waits for itself: somebody was made to wait for stream %d, "
         "which waits for work not yet enqueued",
         by, on);
  sim_lower_flag_now(s, 0);
  st->stalled = false;
  t->stalled = -1;
  for (int d = 0; d < t->p->devices; d++)
    sim_set_capacity(s, d, t->p->capacity);
}

/* ---- the rest ------------------------------------------------------------ */

static void make_own_pool(thread *t, int device)
{
  t->own_pool_ids[device] = ++t->p->pool_ids;
  MUST_AT_LAST(esper_pool_create(t->p->core, device, POOL_ID, t->own_pool_ids[device],
                                 &t->own_pools[device]));
  unsigned flags = chance(t, 2) ? ESPER_POOL_USE_ON_OOM : 0;
  MUST_AT_LAST(
      esper_pool_set_flags(t->p->core, device, POOL_ID, t->own_pool_ids[device], flags, flags));
}

/* As MemPool goes: what is out of the pool outlives it. */
static void let_own_pool_go(thread *t, int device)
{
  esper_core *core = t->p->core;
  uint64_t id = t->own_pool_ids[device];
  MUST(esper_pool_release(core, device, POOL_ID, id));
  MUST_AT_LAST(esper_pool_empty(core, device, POOL_ID, id));
}

/* It keeps its memory from others while it is there. */
static void replace_own_pool(thread *t, int device)
{
  let_own_pool_go(t, device);
  make_own_pool(t, device);
}

static void hear_nothing(void *context, const esper_trace_entry *entry)
{
  (void)context, (void)entry;
}

static void do_limits(thread *t)
{
  program *p = t->p;
  int device = draw(t, p->devices);
  switch (draw(t, 7)) {
  case 0: MUST_AT_LAST(esper_empty_cache(p->core, device, NULL)); break;
  case 1:
    MUST_AT_LAST(
        esper_empty_cache(p->core, device, chance(t, 2) ? p->pools[device] : t->own_pools[device]));
    break;
  case 2: MUST_AT_LAST(esper_set_memory_fraction(p->core, device, (1 + draw(t, 8)) / 8.0)); break;
  case 3:
    MUST_AT_LAST(esper_reset_peak_stats(p->core, device));
    if (p->threads == 1)
      p->peak[device] = p->live[device];
    break;
  case 4: esper_trace_watch(p->core, chance(t, 2) ? hear_nothing : NULL, NULL); break;
  case 5: replace_own_pool(t, device); break;
  default:
    if (t->capturing < 0)
      sim_device_synchronize(p->s, device);
  }
}

static void do_time(thread *t)
{
  if (!t->p->slow_time || chance(t, 20))
    sim_run_seeded(t->p->s, draw64(&t->random), (size_t)draw(t, 64));
  if (chance(t, 16))
    monotonic_skip((uint64_t)draw(t, 100) * 1000000u); /* streams are waited for again */
  if (chance(t, 16))
    esper_retire(t->p->core, draw(t, t->p->devices));
  int on = draw_stream(t);
  if (chance(t, 16) && is_usable(&t->streams[on])) {
    esper_stream es = t->streams[on].es;
    sim_stream_synchronize(t->p->s, es.device, es.handle);
  }
}

/* Blocks change hands: marked and freed by another thread than allocated. */
static void do_exchange(thread *t)
{
  program *p = t->p;
  const block *b = draw_block(t);
  if (p->threads == 1)
    return;
  pthread_mutex_lock(&p->shelf_lock);
  if (b && !b->captured && !b->pinned && !b->at_free && p->shelved < 16) {
    block *to = &p->shelf[p->shelved++];
    *to = *b;
    /* Streams 0 to 3 are the same for all threads. */
    if (to->owner > 3)
      to->owner = -1;
    t->blocks[b - t->blocks] = t->blocks[--t->block_count];
  }
  if (p->shelved && t->block_count < MOST_BLOCKS)
    t->blocks[t->block_count++] = p->shelf[--p->shelved];
  pthread_mutex_unlock(&p->shelf_lock);
}

/* As if another process had it for a moment, at work on the owner's stream. Pages that
 * were shared stay until somebody unshares them, which the check above does not know. */
static void do_share(thread *t)
{
  program *p = t->p;
  const block *b = draw_block(t);
  esper_page_name *pages;
  size_t count;
  void *address, *base;
  if (!p->mapped || p->captures || (p->threads == 1 && !p->faults))
    return;
  if (chance(t, 3))
    esper_unshare(p->core);
  if (!b || b->owner < 0 || !is_usable(&t->streams[b->owner]) || t->stalled >= 0)
    return;
  esper_block_info info;
  MUST(esper_find_block(p->core, b->ptr, &info));
  if (!info.mapped && p->classic_pools)
    return;
  if (esper_share(p->core, b->ptr, &address, &pages, &count) != ESPER_OK) {
    if (!p->faults)
      fail("a block cannot be shared: %s", esper_last_error());
    return;
  }
  esper_status status = esper_open_shared(p->core, b->device, pages, count, &base);
  free(pages);
  if (status != ESPER_OK) {
    if (!p->faults)
      fail("what is shared cannot be opened: %s", esper_last_error());
    return;
  }
  esper_stream es = t->streams[b->owner].es;
  sim_kernel(p->s, es.device, es.handle, (char *)base + (b->ptr - (char *)address), b->size,
             SIM_READ | SIM_WRITE);
  MUST(esper_close_shared(p->core, base));
  p->shared = true;
}

static int is_mine(void *context, void *handle)
{
  (void)handle;
  return current == context;
}

static uint64_t phase_pool(const thread *t)
{
  return 200 + (uint64_t)(t - t->p->all);
}

static void let_phases_go(thread *t, int device)
{
  for (; t->phases[device]; t->phases[device]--)
    MUST(esper_pool_release(t->p->core, device, phase_pool(t), 0));
}

/* All that the thread allocates is a private pool's for a while; no graph has memory of
 * that. What it frees may be of an earlier phase, or of none. */
static void do_pool_phase(thread *t)
{
  int device = t->streams[draw_stream(t)].es.device;
  esper_core *core = t->p->core;
  uint64_t id = phase_pool(t);
  /* Where memory may not run out, some pools would keep too much of it. */
  if (!t->p->captures || t->capturing >= 0 || t->stalled >= 0)
    return;
  MUST(esper_pool_begin(core, device, id, 0, is_mine, t));
  t->phases[device]++;
  for (int left = draw(t, 16); left; left--) {
    switch (draw(t, 6)) {
    case 0:
    case 1: do_malloc(t); break;
    case 2: do_free(t); break;
    case 3: do_read_on(t); break;
    case 4: do_record_use(t); break;
    default: do_time(t);
    }
  }
  MUST(esper_pool_end(core, device, id, 0, NULL));
  if (chance(t, 3))
    let_phases_go(t, device);
}

/* A malloc under a tag that sleeps. */
static void malloc_asleep(thread *t, int tag)
{
  void *ptr;
  esper_stream es = t->streams[draw_stream(t)].es;
  esper_status status = malloc_as(t, tag, NULL, draw_size(t), es, &ptr);
  if (status != ESPER_ASLEEP && !t->p->faults)
    fail("a malloc under a tag that sleeps: %s", esper_status_name(status));
}

static void free_any(thread *t)
{
  int i = t->block_count ? draw(t, t->block_count) : 0;
  if (i < t->block_count && !t->blocks[i].pinned)
    free_at(t, i);
}

static void do_asleep(thread *t, int tag)
{
  for (int left = draw(t, 12); left; left--) {
    switch (draw(t, 4)) {
    case 0: free_any(t); break;
    case 1: malloc_asleep(t, tag < 0 ? draw(t, 3) : tag); break;
    case 2:
      t->tag = tag < 0 ? -1 : (tag + 1) % 3;
      if (t->tag >= 0)
        do_malloc(t);
      t->tag = -1;
      break;
    default: do_time(t);
    }
    if (chance(t, 16) && !esper_core_is_valid(t->p->core))
      fail("the core is not valid while memory sleeps");
  }
}

/* Memory of a tag, or all, sleeps for a while. What the program does not touch meanwhile must be as
 * it was, or zero where it asked for that. */
static void do_sleep(thread *t)
{
  program *p = t->p;
  int tag = draw(t, 4) - 1;
  const char *name = tag < 0 ? NULL : TAG_NAMES[tag];
  esper_keep keep = chance(t, 4) ? ESPER_KEEP_NOTHING : ESPER_KEEP_HOST;
  if (!p->tags || p->threads > 1 || t->capturing >= 0 || t->stalled >= 0)
    return;
  sim_allow_loss(p->s, keep == ESPER_KEEP_NOTHING);
  esper_status status = esper_sleep(p->core, -1, name ? &name : NULL, name ? 1 : 0, keep, NULL);
  sim_allow_loss(p->s, 0);
  if (status == ESPER_OK)
    do_asleep(t, tag);
  else if (!p->faults)
    MUST(status);
  if (chance(t, 4)) /* a second one changes nothing */
    (void)esper_sleep(p->core, -1, name ? &name : NULL, name ? 1 : 0, ESPER_KEEP_HOST, NULL);
  enum { TRIES = 64 }; /* after an error a device before the one that failed may sleep */
  for (int tries = 0; tries < 2 * TRIES; tries++) {
    status = esper_wake(p->core, -1, name ? &name : NULL, name ? 1 : 0, NULL);
    if (status == ESPER_OUT_OF_MEMORY)
      free_any(t);
    else if (status == ESPER_OK || !p->faults)
      break;
    for (int d = 0; d < p->devices && tries == TRIES; d++) { /* graphs keep too much of it */
      sim_set_capacity(p->s, d, 4 * p->capacity);
      MUST_AT_LAST(esper_set_memory_fraction(p->core, d, 1));
    }
  }
  if (!has_failed(p))
    MUST(status);
  for (int d = 0; d < p->devices; d++)
    sim_set_capacity(p->s, d, p->capacity);
  if (chance(t, 8))
    esper_sleep_trim(p->core);
}

/* Kinds of operations, in percent, from those of the one before on. */
static const struct {
  int below;
  void (*run)(thread *t);
} OFTEN[] = {{54, do_free},           {62, do_own_kernel},
             {74, do_record_use},     {77, do_record_use_event},
             {81, do_record_stream},  {83, do_read_on},
             {85, do_join_back},      {86, do_free_after_all},
             {88, do_recycle_stream}, {90, do_capture_step},
             {92, do_launch},         {96, do_time},
             {97, do_wait_after_free}};
enum { COMMON = sizeof OFTEN / sizeof *OFTEN };

static void operation(thread *t)
{
  int kind = draw(t, 100);
  if (t->ran_out_on >= 0 && chance(t, 2))
    replace_own_pool(t, t->ran_out_on);
  t->ran_out_on = -1;
  if (chance(t, 8)) {
    do_wait_first(t);
    t->done++;
    return;
  }
  /* Programs breathe: they grow for a while, then shrink. */
  int mallocs = (t->done / 512) % 2 ? 22 : 32;
  size_t i = 0;
  while (i < COMMON && kind >= OFTEN[i].below)
    i++;
  if (kind < mallocs)
    do_malloc(t);
  else if (i < COMMON)
    OFTEN[i].run(t);
  else if (chance(t, 8))
    do_pool_phase(t);
  else if (kind < 98)
    do_fault(t);
  else if (chance(t, 12))
    do_limits(t);
  else if (chance(t, 6))
    do_share(t);
  else if (chance(t, 6))
    do_sleep(t);
  else if (chance(t, 4))
    do_stall(t);
  else
    do_exchange(t);
  t->done++;
}

/* ---- programs ------------------------------------------------------------ */

/* What statistics have of each size class, and the snapshot shows. */
enum {
  ALLOCATION,
  SEGMENT,
  ACTIVE,
  SPLIT,
  ALLOCATED_BYTES,
  RESERVED_BYTES,
  ACTIVE_BYTES,
  SPLIT_BYTES,
  REQUESTED_BYTES,
  FIGURES
};

typedef struct sums {
  int64_t of[FIGURES][ESPER_CLASSES];
  int64_t oversize_blocks, oversize_segments;
} sums;

static void add(sums *sum, const esper_segment_entry *g, int figure, size_t by)
{
  sum->of[figure][ESPER_ALL] += (int64_t)by;
  sum->of[figure][g->large ? ESPER_LARGE : ESPER_SMALL] += (int64_t)by;
}

static sums sums_of(program *p, int device)
{
  sums sum = {0};
  esper_snapshot snapshot;
  MUST(esper_snapshot_take(p->core, device, &snapshot));
  for (size_t i = 0; i < snapshot.segment_count; i++) {
    const esper_segment_entry *g = &snapshot.segments[i];
    size_t oversize = p->max_split && !g->mapped ? p->max_split : SIZE_MAX;
    add(&sum, g, SEGMENT, 1);
    add(&sum, g, RESERVED_BYTES, g->size);
    sum.oversize_segments += g->size >= oversize;
    for (size_t k = 0; k < g->block_count; k++) {
      const esper_block_entry *b = &snapshot.blocks[g->first_block + k];
      if (b->state == ESPER_BLOCK_ALLOCATED) {
        add(&sum, g, ALLOCATION, 1);
        add(&sum, g, ALLOCATED_BYTES, b->size);
        sum.oversize_blocks += b->size >= oversize;
      }
      if (b->state != ESPER_BLOCK_INACTIVE) {
        add(&sum, g, ACTIVE, 1);
        add(&sum, g, ACTIVE_BYTES, b->size);
        add(&sum, g, REQUESTED_BYTES, b->requested);
      } else if (g->block_count > 1 && !g->mapped) {
        add(&sum, g, SPLIT, 1);
        add(&sum, g, SPLIT_BYTES, b->size);
      }
    }
  }
  esper_snapshot_free(&snapshot);
  return sum;
}

static void check_figures(program *p, int device)
{
  esper_stats stats, after;
  sums sum;
  do { /* work may complete in between, for the core asks whether it has */
    MUST(esper_get_stats(p->core, device, &stats));
    sum = sums_of(p, device);
    MUST(esper_get_stats(p->core, device, &after));
  } while (memcmp(&stats, &after, sizeof stats));
  const esper_stat *stat[FIGURES] = {
      stats.allocation,      stats.segment,        stats.active,       stats.inactive_split,
      stats.allocated_bytes, stats.reserved_bytes, stats.active_bytes, stats.inactive_split_bytes,
      stats.requested_bytes,
  };
  for (int f = 0; f < FIGURES; f++)
    for (int c = 0; c < ESPER_CLASSES; c++)
      if (stat[f][c].current != sum.of[f][c] || stat[f][c].peak < stat[f][c].current ||
          stat[f][c].allocated - stat[f][c].freed != stat[f][c].current)
        fail("device %d: figure %d of class %d is %lld, and %lld in the snapshot", device, f, c,
             (long long)stat[f][c].current, (long long)sum.of[f][c]);
  if (stats.oversize_allocations.current != sum.oversize_blocks ||
      stats.oversize_segments.current != sum.oversize_segments)
    fail("device %d: oversize memory is counted wrongly", device);
  if (!p->virtual_memory &&
      stats.num_device_alloc - stats.num_device_free != sum.of[SEGMENT][ESPER_ALL])
    fail("device %d: segments came and went uncounted", device);
  /* Nothing is freed inside a malloc: these two rise and fall by whole calls. */
  if (p->threads == 1 && (stats.allocation[ESPER_ALL].peak != p->peak[device].blocks ||
                          stats.allocated_bytes[ESPER_ALL].peak != p->peak[device].bytes))
    fail("device %d: the peak was %lld bytes, not %lld", device, (long long)p->peak[device].bytes,
         (long long)stats.allocated_bytes[ESPER_ALL].peak);
  sim_alive alive;
  sim_count_alive(p->s, device, &alive);
  /* What was opened as by another process may outlive the page here. */
  size_t reserved = (size_t)sum.of[RESERVED_BYTES][ESPER_ALL];
  if (alive.bytes < reserved || (alive.bytes > reserved && !p->shared))
    fail("device %d: the driver gave %zu bytes, the snapshot shows %zu", device, alive.bytes,
         reserved);
}

static void check_everything(program *p)
{
  if (!esper_core_is_valid(p->core))
    fail("the core is not valid");
  for (int d = 0; d < p->devices; d++)
    check_figures(p, d);
}

static thread make_thread(program *p, uint64_t random)
{
  return (thread){
      .p = p, .random = random, .capturing = -1, .stalled = -1, .ran_out_on = -1, .tag = -1};
}

static void make_streams(thread *t, const stream *shared, int shared_count)
{
  program *p = t->p;
  memcpy(t->streams, shared, (size_t)shared_count * sizeof *shared);
  t->stream_count = shared_count;
  int more = 1 + draw(t, 4);
  for (int i = 0; i < more; i++) {
    int device = draw(t, p->devices);
    unsigned immortal = p->threads == 1 && chance(t, 2) ? ESPER_STREAM_IMMORTAL : 0;
    t->streams[t->stream_count++] =
        (stream){.es = {sim_stream_create(p->s, device), device, immortal}, .alive = true};
  }
  if (chance(t, 3))
    t->streams[t->stream_count++] =
        (stream){.es = {(void *)2, 0, 0}, .alive = true, .special = true};
}

static void *run_thread(void *argument)
{
  thread *t = current = argument;
  uint64_t every = 512 + draw64(&t->random) % 4096;
  while (t->done < t->p->operations) {
    operation(t);
    if (has_failed(t->p))
      break;
    if (t->p->threads == 1 && t->done % every == 0)
      check_everything(t->p);
    if (t->p->threads > 1 && t->done % 2048 == 0 && !esper_core_is_valid(t->p->core))
      fail("the core is not valid");
  }
  do_capture_end(t);
  if (t->graph)
    drop_graph(t);
  while (t->block_count)
    free_at(t, t->block_count - 1);
  current = NULL;
  return NULL;
}

/* Everything was freed: nothing is owed, and all memory can go back, but what
 * captures without a pool were given, which replays may touch for ever. */
static void check_the_end(program *p, bool captured)
{
  no_more_faults(p);
  if (has_failed(p)) {
    if (!p->fatal || !esper_core_is_valid(p->core))
      fail("a device has failed");
    return;
  }
  for (int d = 0; d < p->devices; d++) {
    MUST(sim_device_synchronize(p->s, d));
    MUST_AT_LAST(esper_set_memory_fraction(p->core, d, 1));
  }
  esper_unshare(p->core);
  p->shared = false;
  for (int d = 0; d < p->devices; d++) { /* which keep their memory until then */
    MUST(esper_pool_release(p->core, d, POOL_ID, 1 + (uint64_t)d));
    for (int i = 0; i < p->threads; i++)
      let_own_pool_go(&p->all[i], d);
    for (int i = 0; i < p->threads; i++)
      let_phases_go(&p->all[i], d);
  }
  for (int d = p->devices; d-- > 0;)
    MUST_AT_LAST(esper_empty_cache(p->core, d, NULL));
  for (int d = 0; d < p->devices; d++)
    MUST_AT_LAST(esper_empty_cache(p->core, d, NULL));
  check_everything(p);
  if (captured)
    return;
  for (int d = 0; d < p->devices; d++) {
    esper_counters counters;
    MUST(esper_get_counters(p->core, d, &counters));
    sim_alive alive;
    sim_count_alive(p->s, d, &alive);
    if (alive.bytes)
      fail("device %d: %zu bytes are not given back", d, alive.bytes);
    if (counters.uses_pending || counters.bytes_pending)
      fail("device %d: uses are still pending", d);
  }
}

static uint64_t run_program(uint64_t seed, int threads)
{
  program p = {.seed = seed, .threads = threads};
  thread maker = make_thread(&p, seed);
  current = &maker;
  p.devices = 1 + chance(&maker, 3);
  p.captures = chance(&maker, 3);
  p.faults = chance(&maker, 3);
  static const size_t CAPACITIES[] = {40 * MIB, 100 * MIB, 400 * MIB, 8192 * MIB};
  p.capacity = CAPACITIES[draw(&maker, 4)];
  static const sim_completion COMPLETIONS[] = {SIM_SEEDED, SIM_SEEDED, SIM_WHEN_TOLD, SIM_AT_ONCE};
  sim_options options = {
      .devices = p.devices,
      .capacity = p.capacity,
      .oracle = SIM_ORACLE_KNOWN,
      .completion = COMPLETIONS[draw(&maker, 4)],
      .seed = draw64(&maker.random),
  };
  options.virtual_memory = p.virtual_memory = chance(&maker, 2);
  p.fatal = p.faults && chance(&maker, 4);
  p.tags = chance(&maker, 2) && (threads == 1 || !p.fatal);
  for (int i = 1; i < 3; i++) { /* so that they are known */
    MUST(esper_tag_push(TAG_NAMES[i]));
    MUST(esper_tag_pop());
  }
  p.slow_time = chance(&maker, 3);
  static const size_t ALLOWANCES[] = {0, 1, 8 * MIB, 32 * MIB, ESPER_ALLOWANCE_OFF};
  esper_config config = {
      .allowance = ALLOWANCES[draw(&maker, 5)],
      .max_split_size = chance(&maker, 4) ? 20 * MIB : 0,
      .segments = chance(&maker, 4) ? ESPER_SEGMENTS_AUTO : ESPER_SEGMENTS_MAPPED,
  };
  p.classic_pools = config.segments == ESPER_SEGMENTS_AUTO;
  p.max_split = config.max_split_size;
  /* An option that means nothing for mapped segments asks for classic ones. */
  p.mapped = options.virtual_memory && !(p.classic_pools && p.max_split);
  p.operations = 500 + draw64(&maker.random) % 12000;
  if (threads > 1)
    p.operations = 1000 + draw64(&maker.random) % 4000;
  p.s = sim_create(&options);
  if (!p.s)
    fail("no simulation");
  sim_on_failure(p.s, oracle_failed, NULL);
  MUST(esper_core_create(sim_driver(p.s), &config, &p.core));
  if (p.operations % 2)
    core_set_pages_moved(p.core, 256); /* slack before moved pages */
  for (int d = 0; d < p.devices; d++) {
    uint64_t id = ++p.pool_ids;
    MUST(esper_pool_create(p.core, d, POOL_ID, id, &p.pools[d]));
  }
  pthread_mutex_init(&p.shelf_lock, NULL);

  stream shared[4];
  for (int i = 0; i < 4; i++) {
    int device = i % p.devices;
    bool legacy = i == 2 && chance(&maker, 3);
    shared[i] = (stream){.es = {legacy ? NULL : sim_stream_create(p.s, device), device,
                                ESPER_STREAM_IMMORTAL},
                         .alive = true,
                         .special = legacy};
  }
  thread *all = p.all = calloc((size_t)threads, sizeof *all);
  pthread_t *ids = calloc((size_t)threads, sizeof *ids);
  if (!all || !ids)
    fail("no host memory");
  for (int i = 0; i < threads; i++) {
    all[i] = make_thread(&p, draw64(&maker.random));
    make_streams(&all[i], shared, 4);
    for (int d = 0; d < p.devices; d++)
      make_own_pool(&all[i], d);
  }
  for (int i = 1; i < threads; i++)
    if (pthread_create(&ids[i], NULL, run_thread, &all[i]))
      fail("no thread");
  run_thread(&all[0]);
  for (int i = 1; i < threads; i++)
    pthread_join(ids[i], NULL);

  current = &maker;
  uint64_t captures = 0, unannounced = 0;
  for (int i = 0; i < threads; i++) {
    captures += all[i].captures;
    unannounced += all[i].unannounced;
    maker.done += all[i].done;
  }
  while (p.shelved) {
    maker.blocks[maker.block_count++] = p.shelf[--p.shelved];
    free_at(&maker, maker.block_count - 1);
  }
  check_the_end(&p, unannounced > 0);
  bool failed = has_failed(&p);
  esper_core_destroy(p.core);
  for (int d = 0; d < p.devices && !failed; d++) {
    sim_alive alive;
    sim_count_alive(p.s, d, &alive);
    if (alive.bytes || alive.events || alive.streams)
      fail("the core left %zu bytes, %zu events, %zu streams", alive.bytes, alive.events,
           alive.streams);
  }
  sim_destroy(p.s);
  pthread_mutex_destroy(&p.shelf_lock);
  free(all);
  free(ids);
  /* What captures hold can be all there is, and an eighth of 40 MiB is next to nothing. */
  if (!captures && p.capacity > 40 * MIB && p.handed_out * 4 < p.mallocs && p.mallocs > 1000)
    fail("hardly any malloc got memory: the program tests nothing");
  current = NULL;
  return maker.done;
}

#ifdef ESPER_RULE_SWITCHES
/* --without RULE: to see whether random programs would notice. */
static bool switch_rule_off(const char *name)
{
  static const char *const NAMES[] = {
#define NAME(rule, number, says) #rule,
      ESPER_RULES(NAME)
#undef NAME
  };
  for (int i = 0; i < RULE_COUNT; i++)
    if (!strcmp(NAMES[i], name)) {
      esper_rules_off |= 1ul << i;
      return true;
    }
  return false;
}
#endif

int main(int count, char **arguments)
{
  uint64_t seed = 1, operations = 200000, programs = UINT64_MAX;
  int threads = 1;
  for (int i = 1; i < count; i += 2) {
#ifdef ESPER_RULE_SWITCHES
    if (!strcmp(arguments[i], "--without") && i + 1 < count && switch_rule_off(arguments[i + 1]))
      continue;
#endif
    char *end = "?";
    uint64_t value = i + 1 < count ? strtoull(arguments[i + 1], &end, 10) : 0;
    if (*end) {
      fprintf(stderr, "random_programs: %s needs a number\n", arguments[i]);
      return 2;
    }
    if (!strcmp(arguments[i], "--seed"))
      seed = value;
    else if (!strcmp(arguments[i], "--operations"))
      operations = value;
    else if (!strcmp(arguments[i], "--programs"))
      programs = value;
    else if (!strcmp(arguments[i], "--threads"))
      threads = (int)value;
    else {
      fprintf(stderr, "random_programs: unknown option %s\n", arguments[i]);
      return 2;
    }
  }
  if (threads < 1 || threads > 64)
    return 2;
  uint64_t done = 0, ran = 0, first = seed;
  for (; ran < programs && done < operations; ran++)
    done += run_program(seed++, threads);
  printf("%llu operations in %llu programs, seeds from %llu, %d thread%s: the "
         "oracle is content\n",
         (unsigned long long)done, (unsigned long long)ran, (unsigned long long)first, threads,
         threads > 1 ? "s" : "");
  return 0;
}
