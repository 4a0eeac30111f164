/* The happens-before engine against the simulated device, whose oracle knows which accesses are
 * ordered: random programs of streams, events, host waits, marks, frees and graphs. For every
 * access and every free the engine must say what the oracle says. ESPER_AUDIT_PROGRAMS is how many
 * (100,000), ESPER_AUDIT_SEED the first one's seed. */
#include "audit/audit.h"

#include "draw.h"
#include "device/sim/accesses.h"
#include "device/sim/base.h"
#include "device/sim/stream.h"
#include "world.h"

enum { DEVICES = 2, STREAMS = 4, EVENTS = 5, BLOCKS = 40, STEPS = 70, UNITS = 2, UNIT = 512 };
enum { GRAPHS = 3, CAPTURED = 4 };

/* For each block the simulated device has memory of its own for what the oracle is asked. */
enum { ALL, WRITTEN, UNMARKED, REGIONS = UNMARKED + STREAMS };

typedef struct model_block {
  int live, home, is_hazard, reported;
  unsigned allocated, freed; /* steps */
  unsigned until_free;       /* bit i: marked on stream i until the free */
  unsigned marked;           /* bit i: nothing on stream i is unmarked */
} model_block;

/* A graph, which is always replayed on the same stream. */
typedef struct model_graph {
  sim_graph *graph; /* NULL: there is none */
  int stream, count;
  struct {
    int block, first, count, writes;
  } accesses[CAPTURED];
} model_graph;

static sim *s;
static model_graph graphs[GRAPHS];
static void *join[DEVICES]; /* events for the branches of captures */
static unsigned replays;
static void *streams[STREAMS];
static void *events[EVENTS];
static int recorded[EVENTS];
static uintptr_t memory[BLOCKS];
static model_block blocks[BLOCKS];
static int block_count;
static uint64_t random_state, program;
static audit *a;
static unsigned step;
static unsigned races, hazards, silent;
/* All accesses, marks and frees are at one line each, so that what the engine unites is tried.
 * Races are not compared then, and of frees only whether any of a stream's was found so far. */
static int one_line;
static int any_in_use[STREAMS];
static unsigned united;

static unsigned draw(unsigned below)
{
  return (unsigned)draw_below(&random_state, below);
}

static int device_of(int stream)
{
  return stream % DEVICES;
}

static audit_stream name_of(int stream)
{
  return (audit_stream){device_of(stream), (uint64_t)(uintptr_t)streams[stream]};
}

static uintptr_t region(int block, int which)
{
  return memory[block] + (uintptr_t)which * UNITS * UNIT;
}

static uintptr_t address_of(int block)
{
  return (uintptr_t)(block + 1) * 0x10000;
}

#define AGREE(x)                                                                     \
  ((x) ? (void)0                                                                     \
       : check_failed(__FILE__, __LINE__, "%s (ESPER_AUDIT_SEED=%llu, step %u)", #x, \
                      (unsigned long long)program, step))

/* What the oracle says: whether all accesses to those units come before the stream's future. */
static int is_ordered(uintptr_t address, size_t size, int device, void *handle)
{
  sim_piece p;
  int ordered = 1;
  sim_enter(s);
  sim_stream *stream = sim_stream_find(s, device, handle, "is_ordered");
  for (uintptr_t at = address; at < address + size; at += p.size) {
    AGREE(sim_piece_at(s, "is_ordered", -1, at, address + size, &p));
    for (size_t i = sim_stretch_at(p.physical, p.offset);
         i < p.physical->stretch_count && p.physical->stretches[i].begin < p.offset + p.size; i++) {
      const sim_marks *marks = p.physical->stretches[i].marks;
      for (uint32_t k = 0; marks && k < marks->count; k++)
        ordered &= sim_mark_is_before(s, &marks->at[k], stream);
    }
  }
  sim_leave(s);
  return ordered;
}

static int units_are_ordered(int block, int which, int first, int count, int stream)
{
  return is_ordered(region(block, which) + (uintptr_t)first * UNIT, (size_t)count * UNIT,
                    device_of(stream), streams[stream]);
}

static void touch_units(int block, int which, int first, int count, int stream)
{
  sim_kernel(s, device_of(stream), streams[stream],
             (const void *)(region(block, which) + (uintptr_t)first * UNIT), (size_t)count * UNIT,
             SIM_WRITE);
}

/* The accesses on `user` to the block that no mark protects: whether they come before the future of
 * `stream`. */
static int unmarked_are_ordered(const model_block *b, int user, int stream)
{
  return (b->marked >> user & 1) ||
         units_are_ordered((int)(b - blocks), UNMARKED + user, 0, UNITS, stream);
}

/* ---- what the engine says -------------------------------------------------- */

/* Of the findings from `first` on: the races of this step, and which frees were found. */
static int races_since(size_t first)
{
  int found = 0;
  for (size_t i = first; i < audit_finding_count(a); i++) {
    const audit_finding *f = audit_finding_at(a, i);
    if (!one_line && (f->kind == AUDIT_READ_EARLY || f->kind == AUDIT_WRITE_EARLY)) {
      AGREE(f->later.place.site == step);
      found++;
    }
  }
  return found;
}

static unsigned site_now(void)
{
  return one_line ? 1 : step;
}

/* Two blocks may be freed in one step. */
static unsigned free_site(const model_block *b)
{
  if (one_line)
    return 2 + (unsigned)b->home;
  return b->freed * BLOCKS + (unsigned)(b - blocks);
}

static int free_was_found(size_t first, const model_block *b)
{
  for (size_t i = first; i < audit_finding_count(a); i++) {
    const audit_finding *f = audit_finding_at(a, i);
    if ((f->kind == AUDIT_FREED_IN_USE || f->kind == AUDIT_MARKED_EARLY) &&
        f->freed == free_site(b))
      return 1;
  }
  return 0;
}

/* Compares what is said of earlier frees when `stream` touches memory that `home` was given at step
 * `allocated`. */
static void compare_frees(size_t first, int home, unsigned allocated, int stream)
{
  for (model_block *b = blocks; b < blocks + block_count; b++) {
    if (!b->is_hazard || b->reported || b->home != home)
      continue;
    int in_use = 0;
    for (int user = 0; user < STREAMS; user++)
      in_use |= b->freed < allocated && !unmarked_are_ordered(b, user, stream);
    if (!one_line)
      AGREE(free_was_found(first, b) == in_use);
    hazards += (unsigned)in_use;
    b->reported = in_use;
    any_in_use[home] |= in_use;
  }
  for (model_block *b = blocks; one_line && b < blocks + block_count; b++)
    if (b->home == home && !b->live) {
      AGREE(free_was_found(0, b) == any_in_use[home]);
      united++;
    }
}

/* ---- the steps ------------------------------------------------------------- */

static void allocate(void)
{
  if (block_count == BLOCKS)
    return;
  const int block = block_count++, stream = (int)draw(STREAMS);
  model_block *b = &blocks[block];
  *b = (model_block){.live = 1, .home = stream, .allocated = step};
  /* What the stream is ordered after by now is no danger to what it is given from now on. */
  for (model_block *old = blocks; old < b; old++) {
    if (old->is_hazard && !old->reported && old->home == stream) {
      int in_use = 0;
      for (int user = 0; user < STREAMS; user++) {
        if (unmarked_are_ordered(old, user, stream))
          old->marked |= 1u << user;
        else
          in_use = 1;
      }
      old->is_hazard = in_use;
    }
  }
  const audit_stream name = name_of(stream);
  audit_allocated(a, address_of(block), UNITS * UNIT, &name, step);
  touch_units(block, ALL, 0, UNITS, stream);
  touch_units(block, WRITTEN, 0, UNITS, stream);
}

static void drop_graph(model_graph *g)
{
  if (g->graph)
    sim_graph_destroy(s, g->graph);
  g->graph = NULL;
  audit_graph_destroyed(a, (uint64_t)(g - graphs) + 1);
}

static void free_block(int block)
{
  model_block *b = &blocks[block];
  for (model_graph *g = graphs; g < graphs + GRAPHS; g++)
    for (int i = 0; g->graph && i < g->count; i++)
      if (g->accesses[i].block == block)
        drop_graph(g); /* its replays may not touch the memory any more */
  b->live = 0;
  b->freed = step;
  for (int marker = 0; marker < STREAMS; marker++)
    for (int user = 0; user < STREAMS && (b->until_free >> marker & 1); user++)
      if (unmarked_are_ordered(b, user, marker))
        b->marked |= 1u << user;
  for (int user = 0; user < STREAMS; user++)
    b->is_hazard |= !unmarked_are_ordered(b, user, b->home);
  silent += !b->is_hazard;
  audit_freed(a, address_of(block), free_site(b));
}

static void tell_access(int block, int first, int count, int writes, int stream)
{
  const audit_access access = {.address = address_of(block),
                               .bytes = {address_of(block) + (uintptr_t)first * UNIT,
                                         (size_t)count * UNIT, 0, 0},
                               .stream = name_of(stream),
                               .writes = writes,
                               .place = {site_now(), 0, 0}};
  audit_accessed(a, &access);
}

static void touch(int block)
{
  model_block *b = &blocks[block];
  const int writes = draw(3) == 0;
  const int first = (int)draw(UNITS), count = 1 + (int)draw((unsigned)(UNITS - first));
  int stream, race, tries = program % 2 ? 6 : 1; /* half the programs avoid races */
  do {
    stream = (int)draw(STREAMS);
    race = !units_are_ordered(block, writes ? ALL : WRITTEN, first, count, stream);
  } while (race && --tries > 0);
  const size_t before = audit_finding_count(a);
  tell_access(block, first, count, writes, stream);
  AGREE(one_line || races_since(before) == race);
  compare_frees(before, b->home, b->allocated, stream);
  touch_units(block, ALL, first, count, stream);
  touch_units(block, UNMARKED + stream, first, count, stream);
  if (writes)
    touch_units(block, WRITTEN, first, count, stream);
  b->marked &= ~(1u << stream);
  races += (unsigned)race;
  if (race)
    free_block(block); /* a second race with the same access would not be named */
}

/* Captures a few accesses on a stream, some of them in a branch on another one. */
static void capture(void)
{
  model_graph *g = &graphs[draw(GRAPHS)];
  const int stream = (int)draw(STREAMS), branch = (stream + DEVICES) % STREAMS;
  const int device = device_of(stream);
  drop_graph(g);
  *g = (model_graph){.stream = stream};
  audit_capture_began(a, name_of(stream));
  sim_capture_begin(s, device, streams[stream]);
  sim_event_record(s, device, join[device], streams[stream]);
  audit_record(a, 1000, name_of(stream));
  sim_stream_wait(s, device, streams[branch], join[device]);
  audit_wait(a, name_of(branch), 1000);
  for (int i = 0; i < CAPTURED; i++) {
    const int block = (int)draw((unsigned)block_count), on = draw(2) ? branch : stream;
    const int writes = draw(3) == 0, first = (int)draw(UNITS);
    const int count = 1 + (int)draw((unsigned)(UNITS - first));
    if (!blocks[block].live)
      continue;
    tell_access(block, first, count, writes, on);
    touch_units(block, ALL, first, count, on);
    touch_units(block, UNMARKED + stream, first, count, on);
    if (writes)
      touch_units(block, WRITTEN, first, count, on);
    g->accesses[g->count].block = block;
    g->accesses[g->count].first = first;
    g->accesses[g->count].count = count;
    g->accesses[g->count++].writes = writes;
  }
  sim_event_record(s, device, join[device], streams[branch]);
  audit_record(a, 1000, name_of(branch));
  sim_stream_wait(s, device, streams[stream], join[device]);
  audit_wait(a, name_of(stream), 1000);
  g->graph = sim_capture_end(s, device, streams[stream]);
  CHECK(g->graph);
  audit_capture_ended(a, name_of(stream), (uint64_t)(g - graphs) + 1);
}

static void replay(void)
{
  model_graph *g = &graphs[draw(GRAPHS)];
  unsigned raced = 0;
  if (!g->graph)
    return;
  const model_graph was = *g; /* freeing a block drops it */
  for (int i = 0; i < was.count; i++)
    if (!units_are_ordered(was.accesses[i].block, was.accesses[i].writes ? ALL : WRITTEN,
                           was.accesses[i].first, was.accesses[i].count, was.stream))
      raced |= 1u << i;
  const size_t before = audit_finding_count(a);
  audit_replayed(a, (uint64_t)(g - graphs) + 1, name_of(was.stream),
                 (audit_place){site_now(), 0, 0});
  AGREE(one_line || (races_since(before) > 0) == (raced != 0));
  unsigned latest[STREAMS] = {0}; /* allocation of what is touched, by its stream */
  for (int i = 0; i < was.count; i++) {
    model_block *b = &blocks[was.accesses[i].block];
    if (latest[b->home] < b->allocated)
      latest[b->home] = b->allocated;
    b->marked &= ~(1u << was.stream);
  }
  for (int home = 0; home < STREAMS; home++)
    compare_frees(before, home, latest[home], was.stream);
  sim_graph_launch(s, was.graph, device_of(was.stream), streams[was.stream]);
  replays++;
  for (int i = 0; i < was.count; i++)
    if ((raced >> i & 1) && blocks[was.accesses[i].block].live)
      free_block(was.accesses[i].block);
}

static void mark_block(int block)
{
  model_block *b = &blocks[block];
  const int stream = (int)draw(STREAMS), event = (int)draw(EVENTS);
  switch (draw(3)) {
  case 0:
    audit_marked(a, address_of(block), name_of(stream), 1, site_now());
    b->until_free |= 1u << stream;
    break;
  case 1:
    audit_marked(a, address_of(block), name_of(stream), 0, site_now());
    for (int user = 0; user < STREAMS; user++)
      if (unmarked_are_ordered(b, user, stream))
        b->marked |= 1u << user;
    break;
  default: {
    if (!recorded[event])
      break;
    audit_marked_by_event(a, address_of(block), (uint64_t)event + 1, site_now());
    void *behind = sim_stream_create(s, 0);
    sim_stream_wait(s, 0, behind, events[event]);
    /* Whoever waits for the device waits for this stream, too. */
    audit_wait(a, (audit_stream){0, (uint64_t)(uintptr_t)behind}, (uint64_t)event + 1);
    for (int user = 0; user < STREAMS; user++)
      if (is_ordered(region(block, UNMARKED + user), UNITS * UNIT, 0, behind))
        b->marked |= 1u << user;
    sim_stream_destroy(s, 0, behind);
    break;
  }
  }
}

static void order(void)
{
  const int stream = (int)draw(STREAMS), event = (int)draw(EVENTS);
  const int device = event % DEVICES;
  switch (draw(16)) {
  case 0:
    sim_device_synchronize(s, device);
    audit_device_synchronized(a, device);
    break;
  case 1:
    sim_stream_synchronize(s, device_of(stream), streams[stream]);
    audit_stream_synchronized(a, name_of(stream));
    break;
  case 2:
    if (recorded[event]) {
      sim_event_synchronize(s, device, events[event]);
      audit_event_synchronized(a, (uint64_t)event + 1);
    }
    break;
  case 3:
  case 4:
  case 5:
  case 6:
  case 7:
    if (device == device_of(stream)) {
      sim_event_record(s, device, events[event], streams[stream]);
      audit_record(a, (uint64_t)event + 1, name_of(stream));
      recorded[event] = 1;
    }
    break;
  default:
    if (recorded[event]) {
      sim_stream_wait(s, device_of(stream), streams[stream], events[event]);
      audit_wait(a, name_of(stream), (uint64_t)event + 1);
    }
  }
}

static void one_program(void)
{
  random_state = program;
  one_line = program % 4 == 0;
  memset(any_in_use, 0, sizeof any_in_use);
  a = audit_create();
  CHECK(a);
  block_count = 0;
  memset(blocks, 0, sizeof blocks);
  memset(recorded, 0, sizeof recorded);
  for (step = 1; step <= STEPS; step++) {
    const unsigned what = draw(22);
    int block = block_count ? (int)draw((unsigned)block_count) : 0;
    if (what < 3)
      allocate();
    else if (what < 11)
      order();
    else if (what == 20 && block_count)
      capture();
    else if (what == 21)
      replay();
    else if (block_count && blocks[block].live) {
      if (what < 17)
        touch(block);
      else if (what < 18)
        mark_block(block);
      else
        free_block(block);
    }
  }
  const size_t before = audit_finding_count(a);
  int in_use_before[STREAMS];
  memcpy(in_use_before, any_in_use, sizeof in_use_before);
  audit_judge_rest(a);
  for (model_block *b = blocks; b < blocks + block_count; b++) {
    int in_use = 0;
    for (int user = 0; user < STREAMS; user++)
      in_use |= b->is_hazard && !b->reported && !unmarked_are_ordered(b, user, b->home);
    any_in_use[b->home] |= in_use;
    AGREE(one_line || free_was_found(before, b) == in_use || !b->is_hazard || b->reported);
  }
  /* What is in use at the end alone is not found where frees at this line were ordered before. */
  for (model_block *b = blocks; one_line && b < blocks + block_count; b++)
    AGREE(b->live || (free_was_found(0, b) <= any_in_use[b->home] &&
                      free_was_found(0, b) >= in_use_before[b->home]));
  for (model_graph *g = graphs; g < graphs + GRAPHS; g++)
    drop_graph(g);
  CHECK(audit_is_complete(a));
  audit_destroy(a);
  /* The next program begins where everything is over. */
  for (int device = 0; device < DEVICES; device++)
    sim_device_synchronize(s, device);
}

static uint64_t number_in(const char *variable, uint64_t otherwise)
{
  const char *text = getenv(variable);
  return text ? strtoull(text, NULL, 10) : otherwise;
}

TEST(the_engine_says_what_the_oracle_says)
{
  const sim_options options = {WHEN_TOLD, .devices = DEVICES};
  const uint64_t seed = number_in("ESPER_AUDIT_SEED", 1);
  const uint64_t programs = number_in("ESPER_AUDIT_PROGRAMS", 100000);
  s = sim_create(&options);
  CHECK(s);
  const esper_driver *d = sim_driver(s);
  for (int i = 0; i < STREAMS; i++)
    streams[i] = sim_stream_create(s, device_of(i));
  for (int i = 0; i < EVENTS; i++)
    events[i] = sim_event_create(s, i % DEVICES);
  for (int i = 0; i < DEVICES; i++)
    join[i] = sim_event_create(s, i);
  for (int i = 0; i < BLOCKS; i++) {
    CHECK_OK(d->memory_alloc(d->self, 0, REGIONS * UNITS * UNIT, &memory[i]));
    sim_owner_begin(s, (const void *)memory[i], REGIONS * UNITS * UNIT, 0, streams[0]);
  }
  for (program = seed; program < seed + programs; program++)
    one_program();
  printf("  %u races, %u frees in use, %u frees that are fine, %u replays\n", races, hazards,
         silent, replays);
  CHECK(united > programs);
  CHECK(races >= programs / 2 && hazards > programs / 10 && silent > programs);
  CHECK(replays > programs / 10);
  sim_destroy(s);
}
