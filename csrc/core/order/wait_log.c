#include "wait_log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/error.h"
#include "record.h"
#include "stream.h"

static bool is_over(const gate_t *gate)
{
  const record_t *record = gate->record;
  return !record || stream_completed(record->stream, record->number);
}

/* The next place, or one shortly after it where nothing is lost. */
static gate_t *place(device_t *device)
{
  enum { LOOK_AT = 8 };
  for (unsigned i = 0; i < LOOK_AT; i++) {
    gate_t *gate = &device->gates[(device->next_gate + i) % GATES];
    if (is_over(gate)) {
      device->next_gate = (device->next_gate + i + 1) % GATES;
      return gate;
    }
  }
  gate_t *oldest = &device->gates[device->next_gate];
  device->next_gate = (device->next_gate + 1) % GATES;
  return oldest;
}

void gates_note(device_t *device, const stream_t *waiting, record_t *record, size_t size)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  gate_t *gate = place(device);
  if (gate->record)
    record_drop(gate->record);
  record_keep(record);
  *gate = (gate_t){
      .waiting = waiting,
      .record = record,
      .size = size,
      .issued_us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000,
  };
}

void gates_forget(device_t *device)
{
  for (int i = 0; i < GATES; i++)
    if (device->gates[i].record)
      record_drop(device->gates[i].record);
  memset(device->gates, 0, sizeof device->gates);
}

static int by_time(const void *a, const void *b)
{
  const esper_gate_entry *x = a, *y = b;
  return (x->issued_us > y->issued_us) - (x->issued_us < y->issued_us);
}

esper_status gates_copy(device_t *device, esper_gate_entry **entries, size_t *count)
{
  *count = 0;
  *entries = malloc(GATES * sizeof **entries);
  if (!*entries)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a copy of %d gates", (int)GATES);
  stream_retire_all(device->core);
  lock(&device->lock);
  for (int i = 0; i < GATES; i++) {
    const gate_t *gate = &device->gates[i];
    if (!is_over(gate))
      (*entries)[(*count)++] = (esper_gate_entry){
          .device = device->index,
          .waiting = gate->waiting->handle,
          .stream_device = gate->record->stream->device->index,
          .stream = gate->record->stream->handle,
          .number = gate->record->number,
          .size = gate->size,
          .issued_us = gate->issued_us,
      };
  }
  unlock(&device->lock);
  qsort(*entries, *count, sizeof **entries, by_time);
  return ESPER_OK;
}

bool gates_are_valid(const device_t *device)
{
  bool valid = device->next_gate < GATES;
  for (int i = 0; i < GATES && valid; i++) {
    const gate_t *gate = &device->gates[i];
    valid = !gate->record || (gate->waiting && gate->waiting->device == device && gate->size);
  }
  return valid;
}
