/* sharing_world.h: what the tests of shared pages share. One core names pages, another opens them,
 * as in two processes. Both are over one simulated device, which knows where each page is mapped
 * and who still accesses it. */
#ifndef ESPER_SHARING_WORLD_H
#define ESPER_SHARING_WORLD_H

#include "core/base/types.h"
#include "world.h"

static world w;
static esper_core *there; /* the other process */
__attribute__((unused)) static esper_stream r, far;
__attribute__((unused)) static esper_stream t, t_far; /* streams of the other process */

static inline void begin(void)
{
  sim_options options = {WHEN_TOLD, .devices = 2, .virtual_memory = 1, .capacity = 256 * MIB};
  esper_config pages_of_4_mib = {.large_segment_size = 4 * MIB};
  world_begin_with(&w, &options, &pages_of_4_mib);
  CHECK_OK(esper_core_create(sim_driver(w.s), &pages_of_4_mib, &there));
  r = w.stream[0];
  far = world_stream(&w, 1);
  t = world_stream(&w, 0);
  t_far = world_stream(&w, 1);
  void *known; /* to the other process */
  CHECK_OK(esper_malloc(there, 512, t, &known));
  CHECK_OK(esper_free(there, known));
  CHECK_OK(esper_empty_cache(there, 0, NULL));
}

static inline void end(void)
{
  CHECK(esper_core_is_valid(there));
  esper_core_destroy(there);
  world_end(&w);
}

static inline void *get(size_t mib)
{
  return world_malloc(&w, mib * MIB, r);
}

static inline uint64_t calls(sim_call call)
{
  return sim_calls(w.s, call);
}

static inline sim_alive alive(void)
{
  return world_alive(&w, 0);
}

/* What travels, and what came of it. */
typedef struct sent {
  esper_page_name *pages;
  size_t count, offset;
  void *base; /* in the other process; NULL: not opened */
} sent;

static inline sent share(const void *p)
{
  sent x = {0};
  void *address;
  CHECK_OK(esper_share(w.core, p, &address, &x.pages, &x.count));
  x.offset = (size_t)((const char *)p - (const char *)address);
  return x;
}

static inline char *open_there(sent *x)
{
  CHECK_OK(esper_open_shared(there, 0, x->pages, x->count, &x->base));
  return (char *)x->base + x->offset;
}

static inline char *send_there(const void *p, sent *x)
{
  *x = share(p);
  return open_there(x);
}

static inline void close_there(sent *x)
{
  CHECK_OK(esper_close_shared(there, x->base));
  free(x->pages);
}

static inline void touch(esper_stream stream, void *p, size_t size)
{
  sim_kernel(w.s, stream.device, stream.handle, p, size, SIM_READ | SIM_WRITE);
}

#endif
