/* sim.h: a simulated device that runs anywhere and checks the core.
 *
 * A simulation has two sides. A core is made over its driver (sim_driver). The rest of this header
 * plays the program that uses the core: it launches kernels, records and waits for events, destroys
 * streams, captures graphs and lets time pass. Only calls of the driver are counted and can be made
 * to fail.
 *
 * Streams are queues. An operation is enqueued by a call and executed when time passes: at once,
 * when told (sim_run_...), or as a seeded scheduler decides. All streams are non-blocking: the
 * legacy stream orders nothing but itself.
 *
 * For every byte of physical memory the oracle keeps the accesses that may still be running, and
 * with vector clocks the order that streams, events, host waits and queries establish. A handout
 * fails unless every earlier access to the bytes is ordered before the receiving stream's future.
 * Only established order counts: an access that has run, but that nobody waited for, counts as
 * running, because in another run it would be.
 *
 * Each earlier access must also be ordered before the future of the receiving stream's followers:
 * those that the program has ordered after all the work that it gave that stream, or will have when
 * they wait for an event that is there. They may use the memory at once. Work that the host knows
 * to be over orders everybody, so if that is all that the stream was given, every stream is a
 * follower. What the core enqueues on a program's stream is no work that the program gave it, and
 * where the core makes a stream wait, the program has ordered nothing.
 *
 * Failures go to a handler. By default they are printed, and the process aborts. Threads may
 * share a simulation. */
#ifndef ESPER_SIM_H
#define ESPER_SIM_H

#include <stddef.h>
#include <stdint.h>

#include "../device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sim sim;
typedef struct sim_graph sim_graph;

typedef enum sim_completion {
  SIM_AT_ONCE = 0, /* an operation that need not wait executes at once */
  SIM_WHEN_TOLD,   /* time passes only in sim_run_... and in host waits */
  SIM_SEEDED       /* every driver call lets a random amount of time pass */
} sim_completion;

typedef enum sim_oracle {
  SIM_ORACLE_OFF = 0,
  SIM_ORACLE_KNOWN,   /* an access is over for the host once a query or a wait said so */
  SIM_ORACLE_EXECUTED /* laxer: also once it has executed */
} sim_oracle;

/* All zero means one device of 16 GiB, fake addresses, no mapped pages, no oracle, and operations
 * that complete at once. That is also the fastest. */
typedef struct sim_options {
  int devices;             /* 0: 1; 64 at most */
  size_t capacity;         /* bytes of each device; 0: 16 GiB */
  int backed;              /* nonzero: addresses are host memory; kernels write and check a pattern
                              when they execute */
  int virtual_memory;      /* nonzero: pages can be mapped */
  size_t page_granularity; /* 0: 2 MiB */
  sim_oracle oracle;
  sim_completion completion;
  uint64_t seed; /* for SIM_SEEDED */
} sim_options;

/* NULL: no host memory, or options that make no sense. */
sim *sim_create(const sim_options *options);
/* Also drops what the core still has from the driver; see sim_alive. */
void sim_destroy(sim *s);
const esper_driver *sim_driver(sim *s);

/* ------------------------------------------------------------------------
 * The program: streams, work, events
 * ---------------------------------------------------------------------- */

/* As in CUDA, a destroyed stream's handle is given to the next stream created; its id is never used
 * again. Work on it continues. Handles 0 and 1 are the device's legacy stream, 2 the calling
 * thread's own one. */
void *sim_stream_create(sim *s, int device);
void sim_stream_destroy(sim *s, int device, void *stream);
/* Destroys the calling thread's own stream, as the thread's end does. */
void sim_thread_stream_destroy(sim *s, int device);
uint64_t sim_stream_id(sim *s, int device, void *stream);

typedef enum sim_access { SIM_READ = 1, SIM_WRITE = 2 } sim_access;

/* Enqueues a kernel that accesses [address, address + size), which must lie in one live allocation.
 * It may be another device's, if its pages, if it has any, were opened to `device`. Size 0: work
 * that touches nothing. */
void sim_kernel(sim *s, int device, void *stream, const void *address, size_t size,
                sim_access access);

/* Work that waits for something not yet enqueued: a flag that another stream
 * or the host raises. Flags are 0 to 63. */
void sim_wait_flag(sim *s, int device, void *stream, unsigned flag);
void sim_raise_flag(sim *s, int device, void *stream, unsigned flag);
void sim_raise_flag_now(sim *s, unsigned flag);
void sim_lower_flag_now(sim *s, unsigned flag);

/* Events as the program uses them. Unlike the core, the program may record them on a capturing
 * stream, and wait for a captured one, which makes the waiting stream join the capture. */
void *sim_event_create(sim *s, int device);
void sim_event_destroy(sim *s, int device, void *event);
esper_status sim_event_record(sim *s, int device, void *event, void *stream);
esper_status sim_event_query(sim *s, int device, void *event);
esper_status sim_event_synchronize(sim *s, int device, void *event);
esper_status sim_stream_wait(sim *s, int device, void *stream, void *event);
esper_status sim_stream_synchronize(sim *s, int device, void *stream);
esper_status sim_device_synchronize(sim *s, int device);
/* Makes `stream` wait for everything enqueued on `other`, by an event. */
void sim_stream_wait_stream(sim *s, int device, void *stream, int other_device, void *other);

/* ------------------------------------------------------------------------
 * The program: captures
 * ---------------------------------------------------------------------- */

/* Returns the capture's id, never 0. */
uint64_t sim_capture_begin(sim *s, int device, void *stream);
/* Returns NULL if the capture was invalidated, or a stream was not joined back. */
sim_graph *sim_capture_end(sim *s, int device, void *stream);
/* Ends the capture and discards the graph. */
void sim_capture_abort(sim *s, int device, void *stream);
/* Nonzero: the stream is being captured, and the capture was not invalidated. */
int sim_capture_is_valid(sim *s, int device, void *stream);
/* Replays the graph as one operation of the stream. On a stream that is being captured, adds it as
 * a child graph, which is one node. */
void sim_graph_launch(sim *s, sim_graph *graph, int device, void *stream);
size_t sim_graph_nodes(const sim_graph *graph);
/* Adds a conditional node to `outer`'s capture and begins the capture of its body on `stream`,
 * which must not be in one. The body ends with sim_capture_end, which returns NULL: it runs once,
 * when the outer graph does. What it records is ordered like its node. */
uint64_t sim_capture_body(sim *s, int device, void *outer, void *stream);
/* The program promises, before memory is handed out in the stream's capture, that graphs of one
 * group (not 0) are replayed in the order of their captures. So they may share memory. */
void sim_capture_group(sim *s, int device, void *stream, uint64_t group);
void sim_graph_destroy(sim *s, sim_graph *graph);

/* ------------------------------------------------------------------------
 * Time
 * ---------------------------------------------------------------------- */

/* Executes up to `count` operations of a stream; returns how many ran. */
size_t sim_run_stream(sim *s, int device, void *stream, size_t count);
/* Executes everything that can run; returns how many operations ran. */
size_t sim_run_all(sim *s);
/* Executes, `steps` times, one operation of a randomly chosen stream; returns how many ran. */
size_t sim_run_seeded(sim *s, uint64_t seed, size_t steps);
/* Operations enqueued and not yet executed, of a stream or of all. */
size_t sim_pending(sim *s, int device, void *stream);
size_t sim_pending_all(sim *s);

/* ------------------------------------------------------------------------
 * The oracle
 * ---------------------------------------------------------------------- */

/* Call begin right after a malloc and end right before the free. The bytes must be mapped and
 * have no other owner, and every earlier access to them must be ordered before the stream's
 * future and its followers'. */
void sim_owner_begin(sim *s, const void *address, size_t size, int device, void *stream);
void sim_owner_end(sim *s, const void *address);

/* Whether sim_owner_begin would find every earlier access ordered. */
int sim_is_ordered(sim *s, const void *address, size_t size, int device, void *stream);

/* Pages with live memory may be unmapped only if the host has a copy of that memory, and the memory
 * must get the same contents back. With allowed 1, contents may be lost instead: the memory comes
 * back full of zeros. */
void sim_allow_loss(sim *s, int allowed);

/* Called with a report of every failure, with no lock held. */
typedef void sim_failure_fn(void *context, const char *report);
/* NULL: print and abort. If the handler returns, the call that failed has had no effect or has
 * returned an error, and the simulation goes on. */
void sim_on_failure(sim *s, sim_failure_fn *handler, void *context);
uint64_t sim_failures(sim *s);

/* ------------------------------------------------------------------------
 * Faults, hooks, counts: about the driver's functions
 * ---------------------------------------------------------------------- */

#define SIM_CALLS(C)    \
  C(device_count)       \
  C(memory_info)        \
  C(memory_total)       \
  C(device_synchronize) \
  C(memory_alloc)       \
  C(memory_free)        \
  C(page_granularity)   \
  C(range_reserve)      \
  C(range_free)         \
  C(page_create)        \
  C(page_release)       \
  C(page_map)           \
  C(page_unmap)         \
  C(page_access)        \
  C(peer_check)         \
  C(page_export)        \
  C(page_unexport)      \
  C(page_import)        \
  C(host_alloc)         \
  C(host_free)          \
  C(copy_to_host)       \
  C(copy_to_device)     \
  C(memory_zero)        \
  C(stream_id)          \
  C(stream_capture)     \
  C(stream_create)      \
  C(stream_destroy)     \
  C(stream_wait)        \
  C(capture_tails)      \
  C(capture_before)     \
  C(event_create)       \
  C(event_destroy)      \
  C(event_record)       \
  C(event_query) C(event_record_all) C(event_synchronize) C(event_wait)

typedef enum sim_call {
#define SIM_CALL_ENUM(name) SIM_CALL_##name,
  SIM_CALLS(SIM_CALL_ENUM)
#undef SIM_CALL_ENUM
      SIM_CALL_COUNT,
  SIM_CALL_any = SIM_CALL_COUNT /* any function */
} sim_call;

const char *sim_call_name(sim_call call);

/* Makes the nth call of the function from now on (1: the next) return `status` and have no effect.
 * A function can have one fault; nth 0 removes it. */
void sim_fail_call(sim *s, sim_call call, uint64_t nth, esper_status status);
/* Makes the nth call and all after it fail, until removed: a sticky error. */
void sim_fail_calls_from(sim *s, sim_call call, uint64_t nth, esper_status status);
/* Faults that have happened. */
uint64_t sim_faults(sim *s);

/* Called before or after every call of the function, in the calling thread, with no lock held.
 * `object` is the stream or event of the call, if any; of both, the stream. A hook may use the
 * simulation and wait for threads. NULL removes it; calls in progress may still run it. */
typedef void sim_hook_fn(void *context, sim_call call, int device, void *object);
void sim_before_call(sim *s, sim_call call, sim_hook_fn *hook, void *context);
void sim_after_call(sim *s, sim_call call, sim_hook_fn *hook, void *context);

/* The number of calls so far. SIM_CALL_any: of all functions. */
uint64_t sim_calls(sim *s, sim_call call);

/* What the driver has given out and not got back. */
typedef struct sim_alive {
  size_t allocations, ranges, pages, mappings, streams, events;
  size_t names; /* of exported pages */
  size_t bytes; /* physical: allocations and pages */
  size_t host_blocks, host_bytes;
} sim_alive;
void sim_count_alive(sim *s, int device, sim_alive *alive);

/* Sets the size of the device's memory, for tests of exhaustion. */
void sim_set_capacity(sim *s, int device, size_t bytes);
/* Makes `bytes` of it count as not free, although they are given out on request. */
void sim_set_caches(sim *s, int device, size_t bytes);

/* With reach 0, no device can access another's memory from now on; 1 allows it again. Classic
 * memory is open to every device, as after cudaDeviceEnablePeerAccess. */
void sim_set_reach(sim *s, int reach);
/* With able 0, pages created from now on cannot be exported; 1 allows it again. Exported pages can
 * be imported in this simulation only: two cores over it act like two processes. */
void sim_set_sharing(sim *s, int able);
/* Whether kernels of `device` may access all of [address, address + size). */
int sim_may_access(sim *s, int device, const void *address, size_t size);
/* Whether an access to [address, address + size) would fault: some of it is reserved, and has no
 * page. */
int sim_would_fault(sim *s, const void *address, size_t size);

#ifdef __cplusplus
}
#endif
#endif
