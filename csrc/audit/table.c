/* table.c: open addressing. A removed entry's successors move up, so nothing marks its place. */
#include "table.h"

#include <stdlib.h>

static size_t home_of(const table *t, uint64_t key)
{
  return (size_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (t->capacity - 1);
}

static size_t find(const table *t, uint64_t key)
{
  size_t i = home_of(t, key);
  while (t->at[i].value && t->at[i].key != key)
    i = (i + 1) & (t->capacity - 1);
  return i;
}

void *table_get(const table *t, uint64_t key)
{
  return t->capacity ? t->at[find(t, key)].value : NULL;
}

static int grow(table *t)
{
  table larger = {NULL, t->count, t->capacity ? 2 * t->capacity : 64};
  larger.at = calloc(larger.capacity, sizeof *larger.at);
  if (!larger.at)
    return 0;
  for (size_t i = 0; i < t->capacity; i++)
    if (t->at[i].value)
      larger.at[find(&larger, t->at[i].key)] = t->at[i];
  free(t->at);
  *t = larger;
  return 1;
}

int table_put(table *t, uint64_t key, void *value)
{
  if (2 * (t->count + 1) > t->capacity && !grow(t))
    return 0;
  table_entry *entry = &t->at[find(t, key)];
  t->count += !entry->value;
  *entry = (table_entry){key, value};
  return 1;
}

void *table_remove(table *t, uint64_t key)
{
  if (!t->capacity)
    return NULL;
  size_t hole = find(t, key), mask = t->capacity - 1;
  void *value = t->at[hole].value;
  if (!value)
    return NULL;
  for (size_t i = (hole + 1) & mask; t->at[i].value; i = (i + 1) & mask) {
    size_t home = home_of(t, t->at[i].key);
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      t->at[hole] = t->at[i];
      hole = i;
    }
  }
  t->at[hole].value = NULL;
  t->count--;
  return value;
}

void table_clear(table *t)
{
  free(t->at);
  *t = (table){NULL, 0, 0};
}
