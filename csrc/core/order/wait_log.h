/* gates.h: the gates that were issued for the sake of a device's memory, as the
 * hang report shows them: who waits for whom. A ring, so that a gate costs no
 * memory: when it is full, gates that are known to be over make room first. It
 * keeps the records, so that it can be known. */
#ifndef ESPER_GATES_H
#define ESPER_GATES_H

#include "../base/types.h"

/* A gate, for the hang report. */
typedef struct gate {
  const stream_t *waiting; /* was made to wait */
  record_t *record;        /* for this; NULL: an empty place */
  size_t size;             /* of the block */
  int64_t issued_us;
} gate_t;

enum { GATES = 64 };

/* The presented stream was just made to wait for the record, for a block of
 * `size` bytes. Under the device's lock. */
void gates_note(device_t *device, const stream_t *waiting, record_t *record, size_t size);
void gates_forget(device_t *device);

/* The figures behind esper_gates_copy. */
esper_status gates_copy(device_t *device, esper_gate_entry **entries, size_t *count);

bool gates_are_valid(const device_t *device);

#endif
