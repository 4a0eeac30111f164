/* lock.h: guards the queue of chunks, lanes, sites and what is carried. A leaf: nothing is locked
 * under it. */
#ifndef ESPER_BLACK_BOX_LOCK_H
#define ESPER_BLACK_BOX_LOCK_H

#include <stdbool.h>

void box_lock(void);
bool box_try_lock(void);
void box_unlock(void);
/* In a forked child: another thread of the parent may have held it. */
void box_lock_anew(void);

#endif
