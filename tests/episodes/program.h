/* program.h: what episodes and random programs are made of: a core over a machine, blocks with
 * patterns in them, late reads on other streams, and marks.
 *
 * The core's driver is the machine's, watched: a core that makes one of the program's streams wait,
 * or gives it anything else than events, is found out at once (rule 2). */
#ifndef ESPER_TESTS_PROGRAM_H
#define ESPER_TESTS_PROGRAM_H

#include <stdatomic.h>
#include <stdbool.h>

#include "esper_alloc.h"
#include "machine.h"

#define MIB ((size_t)1 << 20)

enum {
  MOST_STREAMS = MACHINE_STREAMS + 3, /* those after the machine's may be destroyed */
  LATE = 2500,                        /* microseconds: longer than the host needs for an episode */
};

typedef struct block {
  char *at; /* NULL: there was no memory */
  size_t size;
  int owner;        /* place of its stream; -1: that is gone */
  int writer;       /* place of the stream that wrote it */
  uint32_t tag;     /* of the pattern in it */
  unsigned at_free; /* bit i: a use on stream i until the free, which may read on */
  bool after_all;   /* any stream may read on */
} block;

/* The program that is running; one at a time. */
extern struct program {
  uint64_t seed;
  esper_core *core;
  esper_stream streams[MOST_STREAMS];
  int stream_count;
  bool unmarked; /* the control: no marks at all */
  atomic_uint step, tag;
  atomic_ullong handed_out, refused, checks; /* of all programs so far */
} p;

/* Given by whoever runs programs: something is wrong. */
__attribute__((format(printf, 1, 2))) _Noreturn void found(const char *format, ...);
void must(esper_status status, const char *call);

/* `bytes`: what the core may take from the device; 0: no limit. Pages have 20 MiB. */
void program_begin(esper_segments segments, size_t allowance, size_t bytes);
/* Waits for everything, looks at each block once more, and gives it back. */
void program_check(block *blocks, int count);
void program_end(void);

void *handle(int stream);

/* Memory of `owner`, not yet written. `writer`, the first to use it, is that stream, or was ordered
 * after it before the malloc. */
block take_for(size_t size, int owner, int writer);
block take(size_t size, int stream);
block take_written(size_t size, int stream);
void write_block(block *b);
/* Returns the address that it had. */
void *give(block *b);

/* A read from `begin` on, in the order of the reader's stream alone. */
void check_on(const block *b, int reader, size_t begin);
/* A read on another stream, which waits for the writer, after `delay` microseconds. */
void read_on(const block *b, int reader, unsigned delay);

/* The marks there are. note: as an observer of what is used says it. mark_event: the event is
 * recorded again afterwards, on `other`. */
void mark(const block *b, int reader, unsigned flags);
void note(const block *b, int reader);
void mark_event(const block *b, int reader, int other);
void mark_until_free(const block *b, int reader);

/* The driver's queries of events fail from now on. */
void refuse_queries(bool refuse);
/* So often the host may ask for work that never completes; -1: there is no limit. */
void limit_waits(int count);
/* Called before the core makes a stream of its own wait; NULL: nothing is. */
void before_wait(void (*hook)(void));
/* The running core's driver, whose functions may be replaced until the program ends. */
esper_driver *program_driver(void);

#endif
