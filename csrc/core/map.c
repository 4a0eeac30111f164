#include "map.h"

#include <stdlib.h>
#include <string.h>

typedef struct table {
  struct table *older; /* outgrown, kept for readers that still walk it       */
  size_t mask;
  _Atomic(block_t *) bucket[];
} table_t;

struct map {
  ON_ITS_OWN_LINE _Atomic(table_t *) table; /* read by every free                   */
  ON_ITS_OWN_LINE mutex_t lock; /* of everything that writes, and of the segments;
                              held for a few instructions, mostly              */
  size_t count;
  segment_t **segments;
  size_t segment_count, segment_capacity;
};

static table_t *table_create(size_t size)
{
  table_t *table = calloc(1, sizeof(table_t) + size * sizeof(table->bucket[0]));
  if (table)
    table->mask = size - 1;
  return table;
}

static _Atomic(block_t *) *bucket_of(table_t *table, uintptr_t address)
{
  uint64_t hash = address / BLOCK_ALIGN * 0x9e3779b97f4a7c15u;
  return &table->bucket[(hash ^ hash >> 29) & table->mask];
}

/* Links and addresses are read without a lock. */
static block_t *next_of(const block_t *block)
{
  return __atomic_load_n(&block->map_next, __ATOMIC_ACQUIRE);
}

static void link_to(block_t *block, block_t *next)
{
  __atomic_store_n(&block->map_next, next, __ATOMIC_RELEASE);
}

static uintptr_t address_of(const block_t *block)
{
  return __atomic_load_n(&block->address, __ATOMIC_RELAXED);
}

map_t *map_create(void)
{
  map_t *map = host_take(sizeof *map);
  table_t *table = table_create(1024);
  if (!map || !table) {
    free(map);
    free(table);
    return NULL;
  }
  atomic_init(&map->table, table);
  return map;
}

void map_destroy(map_t *map)
{
  if (!map)
    return;
  for (table_t *t = atomic_load(&map->table), *older; t; t = older) {
    older = t->older;
    free(t);
  }
  free(map->segments);
  free(map);
}

static void map_grow(map_t *map)
{
  table_t *old = atomic_load(&map->table);
  table_t *table = table_create((old->mask + 1) * 2);
  if (!table)
    return; /* longer chains, nothing worse */
  table->older = old;
  for (size_t i = 0; i <= old->mask; i++) {
    for (block_t *b = atomic_load(&old->bucket[i]), *next; b; b = next) {
      next = next_of(b);
      _Atomic(block_t *) *bucket = bucket_of(table, b->address);
      link_to(b, atomic_load_explicit(bucket, memory_order_relaxed));
      atomic_store_explicit(bucket, b, memory_order_release);
    }
  }
  atomic_store(&map->table, table);
}

void map_insert(map_t *map, block_t *block)
{
  lock(&map->lock);
  if (map->count >= atomic_load(&map->table)->mask)
    map_grow(map);
  _Atomic(block_t *) *bucket = bucket_of(atomic_load(&map->table), block->address);
  link_to(block, atomic_load_explicit(bucket, memory_order_relaxed));
  atomic_store_explicit(bucket, block, memory_order_release);
  map->count++;
  unlock(&map->lock);
}

void map_remove(map_t *map, block_t *block)
{
  lock(&map->lock);
  _Atomic(block_t *) *bucket = bucket_of(atomic_load(&map->table), block->address);
  block_t *b = atomic_load_explicit(bucket, memory_order_relaxed);
  if (b == block) {
    atomic_store_explicit(bucket, next_of(block), memory_order_release);
  } else {
    while (next_of(b) != block)
      b = next_of(b);
    link_to(b, next_of(block));
  }
  map->count--;
  unlock(&map->lock);
}

/* A walk among changing chains may wander, so it gives up after a while. */
static block_t *map_walk(map_t *map, uintptr_t address, unsigned steps)
{
  table_t *table = atomic_load_explicit(&map->table, memory_order_acquire);
  block_t *b = atomic_load_explicit(bucket_of(table, address), memory_order_acquire);
  while (b && address_of(b) != address && --steps)
    b = next_of(b);
  return b && address_of(b) == address ? b : NULL;
}

block_t *map_find(map_t *map, uintptr_t address)
{
  block_t *block = map_walk(map, address, 64);
  if (block)
    return block;
  lock(&map->lock);
  block = map_walk(map, address, ~0u);
  unlock(&map->lock);
  return block;
}

/* Segments with an address up to `address`. */
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

bool map_insert_segment(map_t *map, segment_t *segment)
{
  lock(&map->lock);
  if (map->segment_count == map->segment_capacity) {
    size_t capacity = map->segment_capacity ? 2 * map->segment_capacity : 64;
    segment_t **segments = realloc(map->segments, capacity * sizeof *segments);
    if (!segments) {
      unlock(&map->lock);
      return false;
    }
    map->segments = segments;
    map->segment_capacity = capacity;
  }
  size_t at = segments_up_to(map, segment->address);
  memmove(&map->segments[at + 1], &map->segments[at],
          (map->segment_count - at) * sizeof *map->segments);
  map->segments[at] = segment;
  map->segment_count++;
  unlock(&map->lock);
  return true;
}

void map_remove_segment(map_t *map, segment_t *segment)
{
  lock(&map->lock);
  size_t at = segments_up_to(map, segment->address) - 1;
  map->segment_count--;
  memmove(&map->segments[at], &map->segments[at + 1],
          (map->segment_count - at) * sizeof *map->segments);
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

size_t map_bytes(const map_t *map)
{
  size_t bytes = sizeof *map + map->segment_capacity * sizeof *map->segments;
  for (table_t *t = atomic_load(&map->table); t; t = t->older)
    bytes += sizeof *t + (t->mask + 1) * sizeof t->bucket[0];
  return bytes;
}

bool map_is_valid(map_t *map)
{
  lock(&map->lock);
  table_t *table = atomic_load(&map->table);
  size_t count = 0;
  bool valid = true;
  for (size_t i = 0; i <= table->mask; i++)
    for (block_t *b = atomic_load(&table->bucket[i]); b; b = next_of(b)) {
      count++;
      valid &= bucket_of(table, b->address) == &table->bucket[i];
    }
  for (size_t i = 1; i < map->segment_count; i++)
    valid &= map->segments[i - 1]->address + map->segments[i - 1]->size <=
             map->segments[i]->address;
  valid &= count == map->count;
  unlock(&map->lock);
  return valid;
}
