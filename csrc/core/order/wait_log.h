/* wait_log.h: the last gates that were issued for a device's memory: which stream waits for which.
 * The hang report shows them. They are in a ring, so that a gate costs no memory; gates that are
 * over are replaced first. The log refers to their records to know when they are. */
#ifndef ESPER_WAIT_LOG_H
#define ESPER_WAIT_LOG_H

#include "../base/types.h"

typedef struct logged_wait {
  const stream_t *waiting; /* the stream that was made to wait */
  record_t *record;        /* what it waits for; NULL: no entry */
  size_t size;             /* of the block that it gets */
  int64_t issued_us;
} logged_wait_t;

enum { WAIT_LOG_ENTRIES = 64 };

/* Notes that `waiting` was made to wait for the record, for a block of `size` bytes. Under the
 * device's lock. */
void wait_log_add(device_t *device, const stream_t *waiting, record_t *record, size_t size);
void wait_log_clear(device_t *device);

/* The answer to esper_gates_copy. */
esper_status wait_log_copy(device_t *device, esper_gate_entry **entries, size_t *count);

bool wait_log_is_valid(const device_t *device);

#endif
