/* one_world.h: for programs that have one world at a time: `w`, and its first streams by name. */
#ifndef ESPER_ONE_WORLD_H
#define ESPER_ONE_WORLD_H

#include "world.h"

__attribute__((unused)) static world w;
__attribute__((unused)) static esper_stream r, s, t;

/* To be called when it has begun. */
static inline void name_streams(void)
{
  r = w.stream[0];
  s = w.stream[1];
  t = w.stream[2];
}

static inline void begin_on(sim_options options, const esper_config *config)
{
  world_begin_with(&w, &options, config);
  name_streams();
}

static inline void end(void)
{
  world_check(&w);
  world_end(&w);
}

/* A file's begin() on a device with these options, and a core that never holds the host back. */
#define BEGIN(...)                              \
  static inline void begin(void)                \
  {                                             \
    begin_on((sim_options){__VA_ARGS__}, NULL); \
  }

static inline void begin_of(size_t mib)
{
  begin_on((sim_options){WHEN_TOLD, .capacity = mib * MIB}, NULL);
}

/* Memory with a kernel of its stream on it. */
static inline void *block(size_t size, esper_stream stream)
{
  void *p = world_malloc(&w, size, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* p, of r, was read on the reader, which has not got there yet, and is free. */
static inline void read_and_free(void *p, esper_stream reader)
{
  world_read_marked(&w, reader, p, r);
  world_free(&w, p);
}

/* Ends the capture that began on the stream. */
static inline sim_graph *captured(esper_stream stream)
{
  sim_graph *graph = sim_capture_end(w.s, 0, stream.handle);
  CHECK(graph);
  return graph;
}

/* Of a malloc that may be refused. */
static inline esper_status try_malloc(size_t size, esper_stream stream)
{
  void *p = &w;
  esper_status status = esper_malloc(w.core, size, stream, &p);
  CHECK(!p == (status != ESPER_OK));
  return status;
}

static inline void check_stat(esper_stat stat, size_t current, size_t peak, size_t allocated,
                              size_t freed)
{
  CHECK_EQ(stat.current, current);
  CHECK_EQ(stat.peak, peak);
  CHECK_EQ(stat.allocated, allocated);
  CHECK_EQ(stat.freed, freed);
}

static inline sim_alive alive(void)
{
  return world_alive(&w, 0);
}

static inline uint64_t calls(sim_call call)
{
  return sim_calls(w.s, call);
}

/* Of device 0. */
static inline int64_t reserved(void)
{
  return world_stats(&w, 0).reserved_bytes[ESPER_ALL].current;
}

static inline int64_t reserved_mib(void)
{
  return reserved() / (int64_t)MIB;
}

#endif
