#include "in_flight.h"

#include "../base/lock.h"
#include "../blocks/block.h"
#include "../order/device.h"

/* By this thread, on any device: it is differences that count, and a malloc is of one. */
static _Thread_local unsigned left_here;

void hands_take(device_t *device)
{
  device->hands++;
}

void hands_leave_some(device_t *device)
{
  core_assert(device->hands > 0);
  device->hands_left++;
  left_here++;
}

void hands_empty(device_t *device)
{
  core_assert(device->hands > 0);
  device->hands--;
  bell_ring(&device->hands_emptied);
}

unsigned hands_left_by_others(const device_t *device)
{
  return device->hands_left - left_here;
}

bool hands_wait(device_t *device, unsigned *left)
{
  for (;;) {
    lock(&device->lock);
    unsigned now = hands_left_by_others(device);
    bool empty = !device->hands;
    int rung = bell_count(&device->hands_emptied);
    unlock(&device->lock);
    if (now != *left) {
      *left = now;
      return true;
    }
    if (empty)
      return false;
    bell_wait(&device->hands_emptied, rung);
  }
}
