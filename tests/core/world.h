/* world.h: what most tests need: a simulated device, a core over it, streams, and memory whose
 * owners the oracle knows. Every helper checks that it succeeded. */
#ifndef ESPER_WORLD_H
#define ESPER_WORLD_H

#include "device/sim/sim.h"
#include "check.h"

enum { WORLD_STREAMS = 8 };

typedef struct world {
  sim *s;
  esper_core *core;
  esper_stream stream[WORLD_STREAMS]; /* immortal, of device 0 */
  char failure[512];                  /* the first report, after world_note_failures */
  int failures;
} world;

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* Options of a device: with the oracle on, and operations that complete when told. */
#define WHEN_TOLD .oracle = SIM_ORACLE_KNOWN, .completion = SIM_WHEN_TOLD

void world_begin(world *w); /* WHEN_TOLD */
/* `config` NULL: the host is never held back; otherwise as the configuration says. */
void world_begin_with(world *w, const sim_options *options, const esper_config *config);
/* From now on the host is held back beyond so many pending bytes; 0: beyond the default. */
void world_set_allowance(world *w, size_t bytes);
/* Frees all memory, destroys the core, and checks that the driver got everything back, unless it
 * refused to take something. */
void world_end(world *w);

/* From now on failures of the simulation are counted and not fatal. */
void world_note_failures(world *w);

/* Makes an immortal stream of a device, or one that may be destroyed. */
esper_stream world_stream(world *w, int device);
esper_stream world_mortal(world *w, int device);
void world_destroy_stream(world *w, esper_stream stream);

void *world_malloc(world *w, size_t size, esper_stream stream);
void *world_malloc_from(world *w, esper_pool *pool, size_t size, esper_stream stream);
void world_free(world *w, void *ptr);
/* Launches a kernel that reads and writes a whole block. */
void world_kernel(world *w, esper_stream stream, const void *ptr);
/* Launches a kernel that reads it on another stream, which first waits for the owner's. */
void world_read_on(world *w, esper_stream reader, const void *ptr, esper_stream owner);
/* The same, and marks that it does. */
void world_read_marked(world *w, esper_stream reader, const void *ptr, esper_stream owner);
void world_use(world *w, const void *ptr, esper_stream stream, unsigned flags);
void world_record_stream(world *w, const void *ptr, esper_stream stream);
esper_pool *world_pool(world *w, int device, uint64_t id, uint64_t second_id);
/* Filters of a pool: every stream; of a world, one that is being captured. */
int world_any_stream(void *context, void *stream);
int world_is_captured(void *w, void *stream);
/* Makes `waiter` wait for everything on `other`. */
void world_wait(world *w, esper_stream waiter, esper_stream other);
/* Executes everything on the stream that can run. */
void world_run(world *w, esper_stream stream);

/* Lets the core record an event for all streams of device 0, and ask which events have
 * completed. */
void world_note_all(world *w);

size_t world_size(world *w, const void *ptr);
sim_alive world_alive(world *w, int device);
esper_stats world_stats(world *w, int device);
esper_counters world_counters(world *w, int device);
/* Whether the driver of the device has refused to take memory back (memory/failure.h). */
int world_has_failed(world *w, int device);

/* A function for sim_before_call() and sim_after_call(). */
#define SIM_HOOK(name)                                                                           \
  static void name(__attribute__((unused)) void *context, __attribute__((unused)) sim_call call, \
                   __attribute__((unused)) int of_device, __attribute__((unused)) void *object)

/* What the core told of its actions, from world_listen() on. */
typedef struct told {
  esper_trace_entry entries[128];
  size_t count;
} told_t;

/* Forgets what was told before, and listens; NULL: nobody does. */
void world_listen(world *w, told_t *to);

/* Checks that every invariant holds and that the statistics agree with the snapshot. */
void world_check(world *w);

#endif
