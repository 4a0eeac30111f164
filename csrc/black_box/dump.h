/* dump.h: when a process writes its black box by itself: memory ran out, or a signal came. */
#ifndef ESPER_BLACK_BOX_DUMP_H
#define ESPER_BLACK_BOX_DUMP_H

#include <stdbool.h>

enum { DUMP_PATH = 4096 };

/* Writes all to a file, which is replaced when it is complete. Returns 0, or an errno (EAGAIN:
 * urgent, and another thread has what is needed; EEXIST: there is something else than a file);
 * then an earlier file is as it was. The rest as in box_write. */
int dump_to(const char *path, const char *why, const char *info, bool urgent);

/* Where it is written when memory runs out: at most once in ten seconds. NULL: nowhere. Returns 0,
 * or ENAMETOOLONG. */
int dump_at_oom(const char *path);
/* Memory ran out. `info` as in box_write. Returns the path that was written, or NULL. */
const char *dump_oom(const char *info);

/* From now on SIGUSR2 writes it to a file, and so does a signal that ends the process by a fault,
 * before it does that. Returns 0, or an errno. */
int dump_at_signals(const char *path);
/* From now on neither happens. */
void dump_no_more(void);

#endif
