/* wait_log.h: the gates that were issued for the sake of a device's memory, as the
 * hang report shows them: who waits for whom. A ring, so that a gate costs no
 * memory: when it is full, gates that are known to be over make room first. It
 * keeps the records, so that it can be known. */
#ifndef ESPER_WAIT_LOG_H
#define ESPER_WAIT_LOG_H

#include "../base/types.h"

/* A gate, for the hang report. */
typedef struct logged_wait {
  const stream_t *waiting; /* was made to wait */
  record_t *record;        /* for this; NULL: an empty place */
  size_t size;             /* of the block */
  int64_t issued_us;
} logged_wait_t;

enum { WAIT_LOG_ENTRIES = 64 };

/* The presented stream was just made to wait for the record, for a block of
 * `size` bytes. Under the device's lock. */
void wait_log_add(device_t *device, const stream_t *waiting, record_t *record, size_t size);
void wait_log_clear(device_t *device);

/* The figures behind esper_gates_copy. */
esper_status wait_log_copy(device_t *device, esper_gate_entry **entries, size_t *count);

bool wait_log_is_valid(const device_t *device);

#endif
