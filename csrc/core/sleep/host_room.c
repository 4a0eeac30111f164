#include "host_room.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"

/* Large enough that copies run at full speed, small enough that a room whose size changes a little
 * has little to pin anew. */
static const size_t CHUNK = 256 * MIB;

static bool reserve_entry(host_room_t *room)
{
  if (room->count < room->room)
    return true;
  size_t more = room->room ? 2 * room->room : 16;
  host_chunk_t *chunks = realloc(room->chunks, more * sizeof *chunks);
  if (!chunks)
    return false;
  room->chunks = chunks;
  room->room = more;
  return true;
}

/* What the driver does not take back stays. */
static void drop_from(host_room_t *room, device_t *device, size_t first)
{
  size_t kept = first;
  for (size_t i = first; i < room->count; i++)
    if (call_host_free(device->core, device->index, room->chunks[i].memory) == ESPER_OK)
      room->bytes -= room->chunks[i].size;
    else
      room->chunks[kept++] = room->chunks[i];
  room->count = kept;
}

static esper_status add_chunk(host_room_t *room, device_t *device, size_t size)
{
  void *memory;
  if (!reserve_entry(room))
    return error_set(ESPER_HOST_MEMORY, "no host memory for a list of chunks");
  esper_status status = call_host_alloc(device->core, device->index, size, &memory);
  if (status == ESPER_OUT_OF_MEMORY) /* which would speak of the device's */
    return error_set(ESPER_HOST_MEMORY,
                     "the host has no %zu bytes of pinned memory to keep what goes to sleep: keep "
                     "nothing, or let less sleep",
                     size);
  if (status != ESPER_OK)
    return error_from_driver(device->core, status);
  room->chunks[room->count++] = (host_chunk_t){memory, size};
  room->bytes += size;
  return ESPER_OK;
}

esper_status host_room_fit(host_room_t *room, device_t *device, size_t bytes)
{
  size_t kept = 0, sum = 0;
  while (kept < room->count && room->chunks[kept].size <= bytes - sum)
    sum += room->chunks[kept++].size;
  drop_from(room, device, kept);
  esper_status status = ESPER_OK;
  while (room->bytes < bytes && status == ESPER_OK) {
    size_t left = bytes - room->bytes;
    status = add_chunk(room, device, left < CHUNK ? left : CHUNK);
  }
  if (status != ESPER_OK)
    drop_from(room, device, kept);
  return status;
}

char *host_room_at(const host_room_t *room, size_t offset, size_t *most)
{
  const host_chunk_t *chunk = room->chunks;
  for (; offset >= chunk->size; chunk++)
    offset -= chunk->size;
  *most = chunk->size - offset;
  return chunk->memory + offset;
}

bool host_room_free(host_room_t *room, device_t *device)
{
  drop_from(room, device, 0);
  if (room->count)
    return false;
  free(room->chunks);
  room->chunks = NULL;
  room->count = room->room = 0;
  return true;
}
