/* host_wait.h: the host waits for an event.
 *
 * The work may wait, in turn, for work that this host has yet to enqueue: an exchange whose peer
 * answers later, a kernel that spins on a flag. So a wait that is not necessary has a limit: it
 * ends when no event of the core's has completed for a second.
 *
 * The wait of a malloc or of a pool that begins, for one record, is trusting: it ends after ten
 * seconds in any case. If it was in vain, the stream is not waited for like that during forty times
 * as long as the wait took. Each further failure doubles that time, and each success halves it. */
#ifndef ESPER_HOST_WAIT_H
#define ESPER_HOST_WAIT_H

#include "stream.h"

/* Waits for the record, however long that takes. */
esper_status record_wait(record_t *record);

/* Waits within the limit. ESPER_NOT_READY: the wait was in vain. */
esper_status record_wait_limited(record_t *record);

/* The same, trusting. ESPER_NOT_READY also says that the stream is not waited for at present. */
esper_status record_wait_trusting(record_t *record);

/* Whether record_wait_trusting waits for the stream at present. */
bool stream_is_trusted(const stream_t *stream);

#endif
