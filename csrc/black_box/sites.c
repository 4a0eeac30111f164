#include "sites.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "lock.h"

enum { MOST_BYTES = 32 << 20 }; /* of names and tables; further places are not told apart */

/* A place in a table that is read without the lock. The number is published last. */
typedef struct place {
  _Atomic uint64_t hash;
  atomic_uint site;
} place_t;

typedef struct table {
  size_t capacity;      /* a power of two */
  struct table *before; /* smaller ones: a thread may still be reading them */
  place_t place[];
} table_t;

typedef struct name {
  uint32_t length;
  char *text;
} name_t;

static _Atomic(table_t *) hashes;
static size_t used;
static name_t *names; /* number 0 is no site */
static unsigned count = 1, names_capacity;
static size_t bytes;
static atomic_bool full;

unsigned site_find(uint64_t hash)
{
  const table_t *t = atomic_load_explicit(&hashes, memory_order_acquire);
  if (!t)
    return 0;
  for (size_t at = hash & (t->capacity - 1);; at = (at + 1) & (t->capacity - 1)) {
    unsigned site = atomic_load_explicit(&t->place[at].site, memory_order_acquire);
    if (!site || atomic_load_explicit(&t->place[at].hash, memory_order_relaxed) == hash)
      return site;
  }
}

static void put(table_t *t, uint64_t hash, unsigned site)
{
  size_t at = hash & (t->capacity - 1);
  while (atomic_load_explicit(&t->place[at].site, memory_order_relaxed))
    at = (at + 1) & (t->capacity - 1);
  atomic_store_explicit(&t->place[at].hash, hash, memory_order_relaxed);
  atomic_store_explicit(&t->place[at].site, site, memory_order_release);
}

static bool make_room(void)
{
  table_t *t = atomic_load_explicit(&hashes, memory_order_relaxed);
  if (t && used + 2 <= t->capacity / 2)
    return true;
  size_t capacity = t ? 2 * t->capacity : 4096, size = sizeof *t + capacity * sizeof *t->place;
  table_t *wider = bytes + size > MOST_BYTES ? NULL : calloc(1, size);
  if (!wider) {
    atomic_store_explicit(&full, true, memory_order_relaxed);
    return false;
  }
  wider->capacity = capacity;
  wider->before = t;
  for (size_t i = 0; t && i < t->capacity; i++)
    if (atomic_load_explicit(&t->place[i].site, memory_order_relaxed))
      put(wider, atomic_load_explicit(&t->place[i].hash, memory_order_relaxed),
          atomic_load_explicit(&t->place[i].site, memory_order_relaxed));
  bytes += size;
  atomic_store_explicit(&hashes, wider, memory_order_release);
  return true;
}

static uint64_t hash_of(const char *text, size_t length)
{
  uint64_t hash = UINT64_C(14695981039346656037);
  for (size_t i = 0; i < length; i++)
    hash = (hash ^ (unsigned char)text[i]) * UINT64_C(1099511628211);
  return hash;
}

/* Names are found by their own hash, in the same table. */
static unsigned find_name(uint64_t hash, const char *text, size_t length)
{
  unsigned site = site_find(hash);
  return site && names[site].length == length && memcmp(names[site].text, text, length) == 0 ? site
                                                                                             : 0;
}

static void put_once(uint64_t hash, unsigned site)
{
  if (site_find(hash))
    return;
  put(atomic_load_explicit(&hashes, memory_order_relaxed), hash, site);
  used++;
}

static unsigned add_name(const char *text, size_t length)
{
  if (count == names_capacity || !names) {
    unsigned wider = names_capacity ? 2 * names_capacity : 1024;
    name_t *moved = realloc(names, wider * sizeof *names);
    if (!moved)
      return 0;
    bytes += (wider - names_capacity) * sizeof *names;
    names = moved;
    names_capacity = wider;
  }
  char *kept = count < MOST_SITES && bytes + length <= MOST_BYTES ? malloc(length) : NULL;
  if (!kept) {
    atomic_store_explicit(&full, true, memory_order_relaxed);
    return 0;
  }
  memcpy(kept, text, length);
  bytes += length;
  names[count] = (name_t){(uint32_t)length, kept};
  return count++;
}

unsigned site_add(uint64_t hash, const char *text, size_t length)
{
  if (!length || length > UINT32_MAX)
    return 0;
  box_lock();
  unsigned site = site_find(hash);
  if (!site && make_room()) {
    uint64_t of_name = hash_of(text, length);
    site = find_name(of_name, text, length);
    site = site ? site : add_name(text, length);
    if (site) {
      put_once(of_name, site);
      put_once(hash, site);
    }
  }
  box_unlock();
  return site;
}

bool sites_are_full(void)
{
  return atomic_load_explicit(&full, memory_order_relaxed);
}

unsigned sites_count(void)
{
  return count;
}

const char *site_name(unsigned site, uint32_t *length)
{
  *length = names[site].length;
  return names[site].text;
}

size_t sites_bytes(void)
{
  return bytes;
}

bool sites_are_valid(void)
{
  const table_t *t = atomic_load_explicit(&hashes, memory_order_acquire);
  size_t found = 0;
  bool valid = true;
  for (size_t i = 0; t && i < t->capacity; i++) {
    unsigned site = atomic_load_explicit(&t->place[i].site, memory_order_relaxed);
    found += site != 0;
    valid &=
        site < count &&
        (!site || site_find(atomic_load_explicit(&t->place[i].hash, memory_order_relaxed)) == site);
  }
  for (unsigned site = 1; site < count; site++)
    valid &= names[site].length && names[site].text;
  return valid && found == used;
}
