#include "in_flight.h"

#include "../base/lock.h"
#include "../blocks/block.h"
#include "../order/device.h"

/* How often this thread returned memory, on any device. Only differences count, and a malloc deals
 * with one device. */
static _Thread_local unsigned left_here;

void in_flight_begin(device_t *device)
{
  device->in_flight++;
}

void in_flight_note_return(device_t *device)
{
  core_assert(device->in_flight > 0);
  device->in_flight_returned++;
  left_here++;
}

void in_flight_end(device_t *device)
{
  core_assert(device->in_flight > 0);
  device->in_flight--;
  bell_ring(&device->in_flight_ended);
}

unsigned in_flight_returned_by_others(const device_t *device)
{
  return device->in_flight_returned - left_here;
}

bool in_flight_wait(device_t *device, unsigned *left)
{
  for (;;) {
    lock(&device->lock);
    unsigned now = in_flight_returned_by_others(device);
    bool empty = !device->in_flight;
    int rung = bell_count(&device->in_flight_ended);
    unlock(&device->lock);
    if (now != *left) {
      *left = now;
      return true;
    }
    if (empty)
      return false;
    bell_wait(&device->in_flight_ended, rung);
  }
}
