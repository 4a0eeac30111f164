/* note_use.h: uses that others observe, without a mark by the program. */
#ifndef ESPER_NOTE_USE_H
#define ESPER_NOTE_USE_H

#include "../base/types.h"

/* The functions of esper_alloc.h, after their arguments were checked. */
esper_status note_uses(core_t *core, const void *const *ptrs, size_t count, esper_stream as);
esper_status note_unseen_uses(core_t *core);

#endif
