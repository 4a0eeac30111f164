/* recorder.h: the black box: a bounded memory of what a program allocated, always on.
 *
 * Each thread writes events into a chunk of its own, without a lock. Full chunks wait in a queue.
 * When the memory is used up, the oldest is used again, and `carried.h` keeps what its events leave
 * allocated. So a file tells of every live allocation, however old, where it came from. */
#ifndef ESPER_BLACK_BOX_RECORDER_H
#define ESPER_BLACK_BOX_RECORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "../esper_alloc.h"
#include "format.h"

/* The number of the place in the program that the calling thread is at; 0: unknown. */
typedef unsigned box_site_fn(void);
/* From now on it is asked; NULL: no place is known. */
void box_find_sites(box_site_fn *site);
/* The number of the calling thread's place; 0: unknown. */
unsigned box_site_here(void);

/* What the calling thread executes, for threads whose place is unknown: a hash, and if `name` is
 * not NULL a name of at most `size` bytes with its NUL. Returns 0 if it is nothing. */
typedef int box_node_fn(uint64_t *hash, char *name, size_t size);
void box_find_nodes(box_node_fn *node);

/* Begins to record what happens in a core, in about so many bytes of host memory at most; or goes
 * on. There is one recording in a process, so the core lives until box_end(). */
void box_begin(esper_core *core, size_t bytes);
/* Ends it. What was recorded stays. */
void box_end(void);

bool box_is_on(void);

typedef struct box_stats {
  bool on;
  uint64_t events_lost; /* not recorded: an address beyond 2^49, or no host memory */
  uint64_t bytes;       /* of host memory */
  uint64_t chunks_used_again;
} box_stats_t;
box_stats_t box_stats(void);

/* Writes all to an open file. `urgent`: from a signal's handler, so the core is not asked, and
 * nothing is waited for. `info`: a JSON object, or NULL. Returns 0, or an errno (EAGAIN: it is
 * urgent, and a thread holds the lock). */
int box_write(int file, const char *why, const char *info, bool urgent);

/* The header of what is written now. With the lock held. */
box_header_t box_header(const char *why);

/* Whether all structures hold. For tests. */
bool box_is_valid(void);
/* Forgets all events. No other thread records. For tests. */
void box_reset(void);

#endif
