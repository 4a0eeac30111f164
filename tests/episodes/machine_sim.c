/* machine_sim.c: the simulated device as a machine for episodes and random programs. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine_sim.h"

static sim *s;
static sim_options next;
static void *streams[MACHINE_STREAMS];
static sim_graph *graphs[64];
static int graph_count;

static void oracle_says(void *context, const char *report)
{
  (void)context;
  machine_noticed(report);
}

sim *machine_sim(void)
{
  return s;
}

void machine_sim_next(sim_options options)
{
  next = options;
}

void machine_open(void)
{
}

const esper_driver *machine_begin(uint64_t seed)
{
  sim_options options = next;
  next = (sim_options){0};
  options.oracle = SIM_ORACLE_KNOWN;
  options.completion = seed % 2 ? SIM_WHEN_TOLD : SIM_SEEDED;
  options.seed = seed;
  options.virtual_memory = 1;
  s = sim_create(&options);
  if (!s) {
    fputs("no host memory for a simulation\n", stderr);
    exit(2);
  }
  sim_on_failure(s, oracle_says, NULL);
  for (int i = 0; i < MACHINE_STREAMS; i++)
    streams[i] = sim_stream_create(s, 0);
  return sim_driver(s);
}

void machine_end(void)
{
  while (graph_count)
    sim_graph_destroy(s, graphs[--graph_count]);
  sim_alive alive;
  sim_count_alive(s, 0, &alive);
  if (alive.allocations + alive.events + alive.streams + alive.pages + alive.ranges +
      alive.mappings + alive.bytes + alive.host_bytes)
    machine_noticed("the core did not give everything back");
  sim_destroy(s);
  s = NULL;
}

void *machine_stream(int index)
{
  return streams[index];
}

void *machine_stream_create(void)
{
  return sim_stream_create(s, 0);
}

void machine_stream_destroy(void *stream)
{
  sim_stream_destroy(s, 0, stream);
}

void machine_wait(void *reader, void *owner)
{
  if (reader != owner)
    sim_stream_wait_stream(s, 0, reader, 0, owner);
}

void machine_delay(void *stream, unsigned microseconds)
{
  (void)microseconds; /* what is enqueued may run late in any case */
  sim_kernel(s, 0, stream, NULL, 0, SIM_READ);
}

void machine_write(void *stream, void *at, size_t size, uint32_t tag)
{
  (void)tag;
  sim_kernel(s, 0, stream, at, size, SIM_WRITE);
}

void machine_check(void *stream, const void *at, size_t begin, size_t size, uint32_t tag,
                   uint32_t step)
{
  (void)tag, (void)step;
  sim_kernel(s, 0, stream, (const char *)at + begin, size - begin, SIM_READ);
}

void *machine_event(void *stream)
{
  void *event = sim_event_create(s, 0);
  sim_event_record(s, 0, event, stream);
  return event;
}

void machine_event_again(void *event, void *stream)
{
  sim_event_record(s, 0, event, stream);
}

void machine_event_done(void *event)
{
  sim_event_destroy(s, 0, event);
}

void machine_stall(void *stream)
{
  sim_wait_flag(s, 0, stream, 0);
}

void machine_let_go(void *stream)
{
  sim_raise_flag(s, 0, stream, 0);
}

void machine_capture_begin(void *stream)
{
  sim_capture_begin(s, 0, stream);
}

void *machine_capture_end(void *stream)
{
  if (!sim_capture_is_valid(s, 0, stream)) {
    sim_capture_abort(s, 0, stream);
    return NULL;
  }
  sim_graph *graph = sim_capture_end(s, 0, stream);
  if (graph && graph_count < 64)
    graphs[graph_count++] = graph;
  return graph;
}

size_t machine_nodes(void *graph)
{
  return sim_graph_nodes(graph);
}

void machine_launch(void *graph, void *stream)
{
  sim_graph_launch(s, graph, 0, stream);
}

void machine_want_contents(void)
{
  next.backed = 1;
}

void machine_write_now(void *at, size_t size, uint32_t tag)
{
  memset(at, (int)tag, size);
}

int machine_reads_now(const void *at, size_t size, uint32_t tag)
{
  const unsigned char *bytes = at;
  while (size && bytes[size - 1] == (unsigned char)tag)
    size--;
  return size == 0;
}

void machine_sync(void *stream)
{
  sim_stream_synchronize(s, 0, stream);
}

int machine_is_busy(void *stream)
{
  return sim_pending(s, 0, stream) > 0;
}

void machine_pause(uint64_t random)
{
  sim_run_seeded(s, random, (size_t)(random % 32));
}

int machine_finish(void)
{
  sim_run_all(s);
  int done = sim_pending_all(s) == 0;
  sim_raise_flag_now(s, 0);
  sim_run_all(s);
  sim_lower_flag_now(s, 0);
  if (done)
    sim_device_synchronize(s, 0);
  return done;
}

machine_error machine_errors(void)
{
  return (machine_error){0};
}

void machine_owner_begin(void *at, size_t size, void *stream)
{
  sim_owner_begin(s, at, size, 0, stream);
}

void machine_owner_end(void *at)
{
  sim_owner_end(s, at);
}
