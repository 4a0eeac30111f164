/* blocks.h: memory, who touches it, and what is wrong with that. */
#ifndef ESPER_AUDIT_BLOCKS_H
#define ESPER_AUDIT_BLOCKS_H

#include "state.h"

/* Judges an access that the stream enqueues now, outside captures or as one of its own capture's,
 * and remembers it. */
void watched_touch(audit *a, block *b, stream *s, const audit_access *access);
/* Forgets who touched it, and which stream it belongs to. */
void watched_disown(audit *a, block *b);
void watched_destroy(audit *a, block *b);

#endif
