/* machine.h: what episodes and random programs do on a device, beside allocating.
 *
 * Two machines implement it: machine_cuda.cu (a GPU, kernels that write and
 * check patterns) and machine_sim.c (the simulated device, whose oracle judges
 * instead). One program runs at a time; the functions that enqueue may be
 * called from several threads of it. */
#ifndef ESPER_TESTS_MACHINE_H
#define ESPER_TESTS_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MACHINE_STREAMS = 4 };

/* What a checking kernel saw first. */
typedef struct machine_error {
  uint32_t count; /* words that were wrong since the program began */
  uint32_t step;  /* of the check: what machine_check was given */
  uint32_t word;  /* which one */
  uint32_t wanted, seen;
} machine_error;

/* Prepares the device, once. Ends the process with status 2 where it cannot. */
void machine_open(void);

/* A program begins: the driver that its core is made over. */
const esper_driver *machine_begin(uint64_t seed);
/* Its core is gone. */
void machine_end(void);

/* Streams that live for ever, and those that come and go. */
void *machine_stream(int index);
void *machine_stream_create(void);
void machine_stream_destroy(void *stream);

/* `reader` waits for all that is on `owner` now. */
void machine_wait(void *reader, void *owner);
/* Keeps the stream busy. */
void machine_delay(void *stream, unsigned microseconds);
/* Kernels over whole words. Where `begin` is not 0, a part is checked. */
void machine_write(void *stream, void *at, size_t size, uint32_t tag);
void machine_check(void *stream, const void *at, size_t begin, size_t size, uint32_t tag,
                   uint32_t step);

/* An event recorded on the stream now, which may be recorded again once the
 * next call of machine_event_done() was made with it. */
void *machine_event(void *stream);
void machine_event_again(void *event, void *stream);
void machine_event_done(void *event);

/* The stream waits for what is not enqueued yet; another one lets it go on. */
void machine_stall(void *stream);
void machine_let_go(void *stream);

/* Captures. machine_capture_end: NULL when it was invalidated. */
void machine_capture_begin(void *stream);
void *machine_capture_end(void *stream);
size_t machine_nodes(void *graph);
void machine_launch(void *graph, void *stream);

/* Contents that outlast their owner: written or checked by the host, when nothing else runs. The
 * simulated device has contents only in a program that wanted them before it began. */
void machine_want_contents(void);
void machine_write_now(void *at, size_t size, uint32_t tag);
int machine_reads_now(const void *at, size_t size, uint32_t tag);

/* The host waits for a stream. */
void machine_sync(void *stream);
/* Whether work that was enqueued on the stream is still to be done. */
int machine_is_busy(void *stream);
/* A moment passes on the host. */
void machine_pause(uint64_t random);
/* The host waits for everything. 0: it hung, and stalled streams were let go. */
int machine_finish(void);
/* What the checks saw; call it after machine_finish(). */
machine_error machine_errors(void);

/* A block begins and ends to belong to somebody: for the simulated device. */
void machine_owner_begin(void *at, size_t size, void *stream);
void machine_owner_end(void *at);

/* Given by the program: the machine itself noticed that something is wrong. */
void machine_noticed(const char *what);

#ifdef __cplusplus
}
#endif
#endif
