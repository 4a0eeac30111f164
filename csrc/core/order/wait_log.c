#include "wait_log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/error.h"
#include "record.h"
#include "retire.h"
#include "stream.h"

static bool is_over(const logged_wait_t *gate)
{
  const record_t *record = gate->record;
  return !record || stream_completed(record->stream, record->number);
}

/* The next entry, or a later one close by whose gate is over. */
static unsigned next_entry(const device_t *device)
{
  enum { LOOK_AT = 8 };
  unsigned next = device->next_logged_wait;
  for (unsigned i = next; i < next + LOOK_AT; i++)
    if (is_over(&device->wait_log[i % WAIT_LOG_ENTRIES]))
      return i % WAIT_LOG_ENTRIES;
  return next;
}

void wait_log_add(device_t *device, const stream_t *waiting, record_t *record, size_t size)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  unsigned entry = next_entry(device);
  logged_wait_t *gate = &device->wait_log[entry];
  device->next_logged_wait = (entry + 1) % WAIT_LOG_ENTRIES;
  if (gate->record)
    record_drop(gate->record);
  record_keep(record);
  *gate = (logged_wait_t){
      .waiting = waiting,
      .record = record,
      .size = size,
      .issued_us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000,
  };
}

void wait_log_clear(device_t *device)
{
  for (int i = 0; i < WAIT_LOG_ENTRIES; i++)
    if (device->wait_log[i].record)
      record_drop(device->wait_log[i].record);
  memset(device->wait_log, 0, sizeof device->wait_log);
}

static int by_time(const void *a, const void *b)
{
  const esper_gate_entry *x = a, *y = b;
  return (x->issued_us > y->issued_us) - (x->issued_us < y->issued_us);
}

esper_status wait_log_copy(device_t *device, esper_gate_entry **entries, size_t *count)
{
  *count = 0;
  *entries = malloc(WAIT_LOG_ENTRIES * sizeof **entries);
  if (!*entries)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a copy of %d gates",
                     (int)WAIT_LOG_ENTRIES);
  stream_retire_all(device->core);
  lock(&device->lock);
  for (int i = 0; i < WAIT_LOG_ENTRIES; i++) {
    const logged_wait_t *gate = &device->wait_log[i];
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

bool wait_log_is_valid(const device_t *device)
{
  bool valid = device->next_logged_wait < WAIT_LOG_ENTRIES;
  for (int i = 0; i < WAIT_LOG_ENTRIES && valid; i++) {
    const logged_wait_t *gate = &device->wait_log[i];
    valid = !gate->record || (gate->waiting && gate->waiting->device == device && gate->size);
  }
  return valid;
}
