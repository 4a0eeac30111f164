#include "in_flight.h"

#include "../base/core_assert.h"
#include "../base/lock.h"
#include "../blocks/block.h"

/* How often this thread returned memory, on any device. Only differences count, and a malloc deals
 * with one device. */
static _Thread_local unsigned returned_here;

void in_flight_begin(device_t *device)
{
  device->in_flight++;
}

void in_flight_note_return(device_t *device)
{
  core_assert(device->in_flight > 0);
  device->in_flight_returned++;
  returned_here++;
}

void in_flight_end(device_t *device)
{
  core_assert(device->in_flight > 0);
  device->in_flight--;
  eventcount_advance(&device->in_flight_ended);
}

unsigned in_flight_returned_by_others(const device_t *device)
{
  return device->in_flight_returned - returned_here;
}

bool in_flight_wait(device_t *device, unsigned *returned_before)
{
  for (;;) {
    lock(&device->lock);
    unsigned now = in_flight_returned_by_others(device);
    bool empty = !device->in_flight;
    int seen = eventcount_read(&device->in_flight_ended);
    unlock(&device->lock);
    if (now != *returned_before) {
      *returned_before = now;
      return true;
    }
    if (empty)
      return false;
    eventcount_wait(&device->in_flight_ended, seen);
  }
}
