/* episode.h: what episodes share. An episode is the shortest program that goes wrong without one of
 * the lifetime rules (docs/rules.md); its name begins with the rule's number. walk_rules.c turns
 * off each rule, and an episode of its number must fail.
 *
 * Episodes run on both machines: on a GPU they find wrong patterns, and on the simulated device its
 * oracle judges. Those below `#ifdef MACHINE_SIM` need a driver that refuses, a second device or a
 * chosen order of completion, and run on the simulated device alone. */
#ifndef ESPER_TESTS_EPISODE_H
#define ESPER_TESTS_EPISODE_H

#include "check.h"
#include "program.h"

#ifdef MACHINE_SIM
#include "machine_sim.h"
/* Where work completes only when somebody waits for it, and addresses are the core's choice. */
#define CHECK_SIM(x) CHECK(x)
#else
#define CHECK_SIM(x) ((void)(x))
#endif

/* Streams by role: R owns and wants memory, S and T read, O is another one. */
enum { R, S, T, O };
enum { X = 12 << 20, Y = 14 << 20, Z = 16 << 20 }; /* bytes: each has a segment of its own */

/* A device that has so many bytes for the core, so that the next malloc must reuse; 0: no limit. */
void begin(size_t bytes);
void begin_mapped(size_t bytes);
/* The host is held back as soon as anything is pending. */
void begin_held_back(void);
/* Waits for everything, and looks at the blocks that are named once more: they must be there. */
#define END(...) end_with((block *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})
void end_with(block *const blocks[]);

/* The owner writes it late. */
void write_late(block *b);
void read_and_mark(const block *b, int reader, unsigned delay);
/* An event of the core's on `stream`, which covers all that is there. */
void record_something(int stream, int other);
/* The host has waited for both, and the core knows. */
void drain_both(int one, int other);

/* Every way to say that `reader` has read it. */
typedef enum { BY_MARK, BY_MARK_UNTIL_FREE, BY_RECORD_STREAM, BY_NOTE, BY_EVENT, MARKS } marked;
void mark_by(marked how, const block *b, int reader);
/* T comes after all that R was given, R is given memory, and T is the first to use it. */
block first_on_T(size_t size);

void capture_begin(int stream);
/* The graph, which must be valid. */
void *capture_end(int stream);
/* Ends R's capture, and launches its graph on `stream`. */
void capture_launch(int stream);

/* A pool for graphs, as PyTorch's captures have one: all that is asked for while it is open comes
 * from it. */
enum { POOL = 7 };
void pool_open(void);
void pool_close(void);
void pool_release(int references);

esper_counters counters_now(void);
size_t reserved_now(void);

/* Adds a stream that may be destroyed, and destroys it; its place stays. */
int mortal_stream(void);
void destroy_stream(int stream);
/* Makes streams until one has the handle that `stream` had, or there are enough, and puts the last
 * of them in its place. */
void replace_stream(int stream);

#endif
