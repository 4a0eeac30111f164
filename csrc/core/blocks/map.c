#include "map.h"

#include <stdlib.h>
#include <string.h>

#include "../base/arena.h"
#include "../base/lock.h"
#include "block.h"

enum {
  CHUNK = 1024, /* buckets that are allocated together */
  FIRST_CHUNKS = 2,
  FULL_AT = 7, /* blocks for eight buckets, which makes 9 bytes for each block */
};

typedef _Atomic(block_t *) bucket_t;

/* Where the buckets are. Outgrown directories stay for threads that still read them. */
typedef struct directory {
  struct directory *older;
  size_t capacity;
  bucket_t *chunk[]; /* entries after the last bucket are zeros */
} directory_t;

struct map {
  ON_ITS_OWN_LINE _Atomic(directory_t *) directory; /* every free reads this and the next */
  _Atomic size_t buckets;
  ON_ITS_OWN_LINE mutex_t lock; /* for all writes and for the segments; mostly held briefly */
  size_t count;
  segment_t **segments;
  size_t segment_count, segment_capacity;
  size_t reserved; /* entries for segments */
};

/* ---- buckets --------------------------------------------------------------- */

/* The address's bucket among `buckets`: the last bits of its hash, or one bit fewer if that bucket
 * does not exist yet. So buckets can be added one by one, and a new bucket takes blocks from one
 * other only (linear hashing). */
static inline size_t bucket_number(uintptr_t address, size_t buckets)
{
  uint64_t hash = address / BLOCK_ALIGN * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 29;
  size_t mask = ~(size_t)0 >> __builtin_clzll(buckets - 1);
  size_t number = hash & mask, before = hash & mask >> 1;
  return number < buckets ? number : before;
}

static inline bucket_t *bucket_at(const directory_t *directory, size_t number)
{
  return &directory->chunk[number / CHUNK][number % CHUNK];
}

static inline bucket_t *bucket_of(const map_t *map, uintptr_t address)
{
  /* Read in this order: then the directory has all of these buckets. */
  size_t buckets = atomic_load_explicit(&map->buckets, memory_order_acquire);
  return bucket_at(atomic_load_explicit(&map->directory, memory_order_acquire),
                   bucket_number(address, buckets));
}

/* Links and addresses may be read without a lock. */
static inline block_t *next_of(const block_t *block)
{
  return __atomic_load_n(&block->map_next, __ATOMIC_ACQUIRE);
}

static inline void link_to(block_t *block, block_t *next)
{
  __atomic_store_n(&block->map_next, next, __ATOMIC_RELEASE);
}

static inline uintptr_t address_of(const block_t *block)
{
  return __atomic_load_n(&block->address, __ATOMIC_RELAXED);
}

static void bucket_insert(bucket_t *bucket, block_t *block)
{
  link_to(block, atomic_load_explicit(bucket, memory_order_relaxed));
  atomic_store_explicit(bucket, block, memory_order_release);
}

static void bucket_remove(bucket_t *bucket, block_t *block)
{
  block_t *b = atomic_load_explicit(bucket, memory_order_relaxed);
  if (b == block) {
    atomic_store_explicit(bucket, next_of(block), memory_order_release);
    return;
  }
  while (next_of(b) != block)
    b = next_of(b);
  link_to(b, next_of(block));
}

/* ---- growing --------------------------------------------------------------- */

static directory_t *directory_create(directory_t *older, size_t capacity)
{
  directory_t *directory = calloc(1, sizeof *directory + capacity * sizeof directory->chunk[0]);
  if (!directory)
    return NULL;
  directory->older = older;
  directory->capacity = capacity;
  if (older)
    memcpy(directory->chunk, older->chunk, older->capacity * sizeof older->chunk[0]);
  return directory;
}

/* Makes room for one more bucket. False: no host memory. */
static bool map_extend(map_t *map, size_t buckets)
{
  directory_t *directory = atomic_load(&map->directory);
  size_t chunk = buckets / CHUNK;
  if (chunk == directory->capacity) {
    directory = directory_create(directory, 2 * chunk);
    if (!directory)
      return false;
    atomic_store_explicit(&map->directory, directory, memory_order_release);
  }
  if (!directory->chunk[chunk])
    directory->chunk[chunk] = host_take(CHUNK * sizeof(bucket_t));
  return directory->chunk[chunk] != NULL;
}

/* The bucket that the last one, `number`, takes its blocks from: the same number without its
 * highest bit. */
static bucket_t *bucket_before(const directory_t *directory, size_t number)
{
  return bucket_at(directory, number & ~(size_t)0 >> 1 >> __builtin_clzll(number));
}

/* Adds one bucket. A reader that misses a block on its way to the new bucket waits for the lock. */
static void map_grow(map_t *map)
{
  size_t number = atomic_load(&map->buckets), buckets = number + 1;
  if (!map_extend(map, number))
    return; /* then chains get longer, nothing worse */
  atomic_store_explicit(&map->buckets, buckets, memory_order_release);
  const directory_t *directory = atomic_load(&map->directory);
  bucket_t *into = bucket_at(directory, number);
  bucket_t *from = bucket_before(directory, number);
  for (block_t *b = atomic_load(from), *next; b; b = next) {
    next = next_of(b);
    if (bucket_number(b->address, buckets) == number) {
      bucket_remove(from, b);
      bucket_insert(into, b);
    }
  }
}

/* ---- blocks ---------------------------------------------------------------- */

map_t *map_create(void)
{
  map_t *map = host_take(sizeof *map);
  directory_t *directory = map ? directory_create(NULL, FIRST_CHUNKS) : NULL;
  if (!directory) {
    free(map);
    return NULL;
  }
  mutex_init(&map->lock, LOCK_LEAF);
  atomic_init(&map->directory, directory);
  for (size_t i = 0; i < FIRST_CHUNKS; i++)
    if (!map_extend(map, i * CHUNK)) {
      map_destroy(map);
      return NULL;
    }
  atomic_init(&map->buckets, FIRST_CHUNKS * CHUNK);
  return map;
}

void map_destroy(map_t *map)
{
  if (!map)
    return;
  directory_t *directory = atomic_load(&map->directory);
  for (size_t i = 0; i < directory->capacity; i++)
    free(directory->chunk[i]);
  for (directory_t *older; directory; directory = older) {
    older = directory->older;
    free(directory);
  }
  free(map->segments);
  free(map);
}

void map_insert(map_t *map, block_t *block)
{
  lock(&map->lock);
  if (map->count >= atomic_load_explicit(&map->buckets, memory_order_relaxed) / 8 * FULL_AT)
    map_grow(map);
  bucket_insert(bucket_of(map, block->address), block);
  map->count++;
  unlock(&map->lock);
}

void map_remove(map_t *map, block_t *block)
{
  lock(&map->lock);
  bucket_remove(bucket_of(map, block->address), block);
  map->count--;
  unlock(&map->lock);
}

/* A walk along changing chains may go astray, so it gives up after a number of steps. */
static inline block_t *map_walk(const map_t *map, uintptr_t address, unsigned steps)
{
  block_t *b = atomic_load_explicit(bucket_of(map, address), memory_order_acquire);
  while (b && address_of(b) != address && --steps)
    b = next_of(b);
  return b && address_of(b) == address ? b : NULL;
}

__attribute__((noinline)) static block_t *find_locked(map_t *map, uintptr_t address)
{
  lock(&map->lock);
  block_t *block = map_walk(map, address, ~0u);
  unlock(&map->lock);
  return block;
}

block_t *map_find(map_t *map, uintptr_t address)
{
  block_t *block = map_walk(map, address, 64);
  return block ? block : find_locked(map, address);
}

/* ---- segments -------------------------------------------------------------- */

/* How many segments begin at or before `address`. */
static size_t segments_up_to(const map_t *map, uintptr_t address)
{
  size_t low = 0, high = map->segment_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (map->segments[middle]->address <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static void put_segment(map_t *map, segment_t *segment)
{
  size_t at = segments_up_to(map, segment->address);
  memmove(&map->segments[at + 1], &map->segments[at],
          (map->segment_count - at) * sizeof *map->segments);
  map->segments[at] = segment;
  map->segment_count++;
}

bool map_reserve_segment(map_t *map)
{
  lock(&map->lock);
  if (map->segment_count + map->reserved == map->segment_capacity) {
    size_t capacity = map->segment_capacity ? 2 * map->segment_capacity : 64;
    segment_t **segments = realloc(map->segments, capacity * sizeof *segments);
    if (!segments) {
      unlock(&map->lock);
      return false;
    }
    map->segments = segments;
    map->segment_capacity = capacity;
  }
  map->reserved++;
  unlock(&map->lock);
  return true;
}

void map_insert_reserved(map_t *map, segment_t *segment)
{
  lock(&map->lock);
  put_segment(map, segment);
  map->reserved--;
  unlock(&map->lock);
}

void map_unreserve_segment(map_t *map)
{
  lock(&map->lock);
  map->reserved--;
  unlock(&map->lock);
}

bool map_insert_segment(map_t *map, segment_t *segment)
{
  bool reserved = map_reserve_segment(map);
  if (reserved)
    map_insert_reserved(map, segment);
  return reserved;
}

void map_remove_segment(map_t *map, segment_t *segment)
{
  lock(&map->lock);
  size_t at = segments_up_to(map, segment->address) - 1;
  map->segment_count--;
  memmove(&map->segments[at], &map->segments[at + 1],
          (map->segment_count - at) * sizeof *map->segments);
  map->reserved++;
  unlock(&map->lock);
}

segment_t *map_find_segment(map_t *map, uintptr_t address)
{
  lock(&map->lock);
  size_t count = segments_up_to(map, address);
  segment_t *segment = count ? map->segments[count - 1] : NULL;
  if (segment && address - segment->address >= segment->size)
    segment = NULL;
  unlock(&map->lock);
  return segment;
}

/* ---- checking -------------------------------------------------------------- */

size_t map_bytes(map_t *map)
{
  lock(&map->lock);
  const directory_t *directory = atomic_load(&map->directory);
  size_t bytes = sizeof *map + map->segment_capacity * sizeof *map->segments;
  size_t chunks = (atomic_load(&map->buckets) + CHUNK - 1) / CHUNK;
  bytes += chunks * CHUNK * sizeof(bucket_t);
  for (; directory; directory = directory->older)
    bytes += sizeof *directory + directory->capacity * sizeof directory->chunk[0];
  unlock(&map->lock);
  return bytes;
}

bool map_is_valid(map_t *map)
{
  lock(&map->lock);
  size_t buckets = atomic_load(&map->buckets), count = 0;
  bool valid = true;
  for (size_t i = 0; i < buckets; i++)
    for (block_t *b = atomic_load(bucket_at(atomic_load(&map->directory), i)); b; b = next_of(b)) {
      count++;
      valid &= bucket_number(b->address, buckets) == i;
    }
  for (size_t i = 1; i < map->segment_count; i++)
    valid &=
        map->segments[i - 1]->address + map->segments[i - 1]->size <= map->segments[i]->address;
  valid &= count == map->count && map->segment_count + map->reserved <= map->segment_capacity;
  unlock(&map->lock);
  return valid;
}
