/* table.h: a hash table from numbers to pointers. */
#ifndef ESPER_AUDIT_TABLE_H
#define ESPER_AUDIT_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct table_entry {
  uint64_t key;
  void *value; /* NULL: the place is empty */
} table_entry;

/* All zero is an empty table. */
typedef struct table {
  table_entry *at;
  size_t count, capacity; /* a power of two, or 0 */
} table;

/* NULL: not there. */
void *table_get(const table *t, uint64_t key);
/* Returns 0 if there is no host memory. `value` is not NULL, and replaces the one of that key. */
int table_put(table *t, uint64_t key, void *value);
/* Returns what was there. */
void *table_remove(table *t, uint64_t key);
void table_clear(table *t);

#endif
