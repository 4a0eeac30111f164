/* host_wait.h: the host waits for an event.
 *
 * The work may wait, in turn, for work that this host has yet to enqueue: an exchange whose peer
 * answers later, a kernel that spins on a flag. So a wait that is not necessary has a limit: it
 * ends when no event of the core's has completed for a second, and after ten seconds in any case.
 *
 * The waits of a malloc, and of a pool that begins, are trusting. After one in vain the device
 * rests for forty times as long as the wait took. Meanwhile the host waits like that only for
 * streams for which the last such wait was not in vain, and for those for which there was none yet,
 * until that has cost two seconds. Memory that other streams keep as well is not waited for. So
 * however many streams are stuck, little time is lost. */
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
bool stream_may_be_awaited(const stream_t *stream);

#endif
