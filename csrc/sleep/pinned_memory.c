#include "pinned_memory.h"

#include <stdlib.h>

#include "../core/base/call.h"
#include "../core/base/error.h"
#include "../core/memory/failure.h"

/* Large enough that copies run at full speed, small enough that little has to be pinned anew when
 * the size changes a little. */
static const size_t CHUNK = 256 * MIB;

static bool reserve_entry(pinned_memory_t *pinned)
{
  if (pinned->count < pinned->capacity)
    return true;
  size_t more = pinned->capacity ? 2 * pinned->capacity : 16;
  pinned_chunk_t *chunks = realloc(pinned->chunks, more * sizeof *chunks);
  if (!chunks)
    return false;
  pinned->chunks = chunks;
  pinned->capacity = more;
  return true;
}

/* If the device has failed, nobody can say whether copies to the memory are over, so it stays. */
static void drop_from(pinned_memory_t *pinned, device_t *device, size_t first)
{
  for (size_t i = first; i < pinned->count; i++) {
    pinned->bytes -= pinned->chunks[i].size;
    if (!device_has_failed(device))
      failure_note(device, call_host_free(device->core, device->index, pinned->chunks[i].memory));
  }
  pinned->count = first;
}

static esper_status add_chunk(pinned_memory_t *pinned, device_t *device, size_t size)
{
  void *memory;
  if (!reserve_entry(pinned))
    return error_set(ESPER_HOST_MEMORY, "no host memory for a list of chunks");
  esper_status status = call_host_alloc(device->core, device->index, size, &memory);
  if (status == ESPER_OUT_OF_MEMORY) /* which would speak of the device's */
    return error_set(ESPER_HOST_MEMORY,
                     "the host has no %zu bytes of pinned memory to keep what goes to sleep: keep "
                     "nothing, or let less sleep",
                     size);
  if (status != ESPER_OK)
    return error_from_driver(device->core, status);
  pinned->chunks[pinned->count++] = (pinned_chunk_t){memory, size};
  pinned->bytes += size;
  return ESPER_OK;
}

esper_status pinned_memory_fit(pinned_memory_t *pinned, device_t *device, size_t bytes)
{
  size_t kept = 0, sum = 0;
  while (kept < pinned->count && pinned->chunks[kept].size <= bytes - sum)
    sum += pinned->chunks[kept++].size;
  drop_from(pinned, device, kept);
  esper_status status = ESPER_OK;
  while (pinned->bytes < bytes && status == ESPER_OK) {
    size_t left = bytes - pinned->bytes;
    status = add_chunk(pinned, device, left < CHUNK ? left : CHUNK);
  }
  if (status != ESPER_OK)
    drop_from(pinned, device, kept);
  return status;
}

char *pinned_memory_at(const pinned_memory_t *pinned, size_t offset, size_t *most)
{
  const pinned_chunk_t *chunk = pinned->chunks;
  for (; offset >= chunk->size; chunk++)
    offset -= chunk->size;
  *most = chunk->size - offset;
  return chunk->memory + offset;
}

void pinned_memory_free(pinned_memory_t *pinned, device_t *device)
{
  drop_from(pinned, device, 0);
  free(pinned->chunks);
  *pinned = (pinned_memory_t){0};
}
