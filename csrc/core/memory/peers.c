#include "peers.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"
#include "imported.h"
#include "page_table.h"

/* Contiguous addresses that have pages. */
typedef struct stretch {
  uint64_t sequence;      /* of its segment */
  const import_t *import; /* or the import that it is */
  uintptr_t address;
  size_t size; /* 0: none */
} stretch_t;

static bool has_page(const segment_t *s, size_t i)
{
  return s->pages[i].granules && !s->pages[i].stale && !s->pages[i].absent;
}

/* The first stretch of a segment from address `at` on (0: from its beginning), without pages that
 * are stale, or absent because they sleep. */
static stretch_t stretch_in(const segment_t *s, uintptr_t at)
{
  if (s->fenced)
    return (stretch_t){s->sequence, NULL, s->address, at ? 0 : s->size};
  size_t granule = s->device->granule, i = at ? page_granule(s, at) : 0, first;
  while (i < s->touched && !has_page(s, i))
    i++;
  first = i;
  while (i < s->touched && has_page(s, i))
    i++;
  return (stretch_t){s->sequence, NULL, s->address + first * granule, (i - first) * granule};
}

static stretch_t next_import(const import_t *import)
{
  while (import && !import->mapped)
    import = import->next;
  return import ? (stretch_t){0, import, import->address, import->mapped} : (stretch_t){0};
}

/* The stretch after `last`: the segments in order of their birth, then the imports. Meanwhile
 * segments can come and go, but only segments without pages. */
static stretch_t next_stretch(device_t *device, stretch_t last)
{
  stretch_t next = {0};
  if (last.import)
    return next_import(last.import->next);
  lock(&device->lock);
  for (const segment_t *s = device->first_segment; s; s = s->next) {
    bool again = last.size && s->sequence == last.sequence;
    if ((!s->pages && !s->fenced) || (last.size && s->sequence < last.sequence))
      continue;
    stretch_t found = stretch_in(s, again ? last.address + last.size : 0);
    if (found.size && (!next.size || found.sequence < next.sequence))
      next = found;
  }
  unlock(&device->lock);
  return next.size ? next : next_import(device->imports);
}

/* After a failure the peer can use some pages, which nobody notices: it is not in the list. */
static esper_status give_access(device_t *device, int peer)
{
  for (stretch_t s = next_stretch(device, (stretch_t){0}); s.size; s = next_stretch(device, s)) {
    esper_status status = call_page_access(device->core, device->index, s.address, s.size, peer);
    if (status != ESPER_OK)
      return error_from_driver(device->core, status);
  }
  return ESPER_OK;
}

static bool is_peer(const device_t *device, int peer)
{
  for (int i = 0; i < device->peer_count; i++)
    if (device->peers[i] == peer)
      return true;
  return false;
}

static esper_status add(device_t *device, int peer)
{
  core_t *core = device->core;
  if (!device->peers && !(device->peers = malloc((size_t)core->device_count * sizeof(int))))
    return error_set(ESPER_HOST_MEMORY, "no host memory for the peers of device %d", device->index);
  esper_status status = call_peer_check(core, device->index, peer);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  status = give_access(device, peer);
  if (status == ESPER_OK)
    device->peers[device->peer_count++] = peer;
  return status;
}

bool peers_has(device_t *device, int peer)
{
  lock(&device->growth_lock);
  bool has = is_peer(device, peer);
  unlock(&device->growth_lock);
  return has;
}

esper_status peers_start(device_t *device)
{
  core_t *core = device->core;
  esper_status status = ESPER_OK;
  device_t *peer;
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++)
    if (peers_has(device, i))
      status = core_device(core, i, &peer);
  return status;
}

esper_status peers_add(device_t *device, int peer)
{
  lock(&device->growth_lock);
  esper_status status = is_peer(device, peer) ? ESPER_OK : add(device, peer);
  unlock(&device->growth_lock);
  return status;
}

void peers_destroy(device_t *device)
{
  free(device->peers);
}
