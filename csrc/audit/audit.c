/* audit.c: makes and destroys an engine. */
#include "audit.h"

#include "blocks.h"
#include "graphs.h"
#include "order.h"

audit *audit_create(void)
{
  return audit_new(sizeof(audit));
}

void audit_destroy(audit *a)
{
  if (!a)
    return;
  for (size_t i = 0; i < a->blocks.capacity; i++)
    if (a->blocks.at[i].value)
      watched_destroy(a, a->blocks.at[i].value);
  table_clear(&a->blocks);
  graphs_destroy(a);
  order_destroy(a);
  table_clear(&a->finding_keys);
  table_clear(&a->ordered_keys);
  for (size_t i = 0; i < AUDIT_ASSUMED; i++)
    clock_clear(&a->assumed[i].before);
  free(a->findings);
  free(a);
}

int audit_is_complete(const audit *a)
{
  return !a->lost;
}

size_t audit_memory(const audit *a)
{
  const table *tables[] = {&a->stream_names, &a->events, &a->blocks,       &a->graphs,
                           &a->captures,     &a->owners, &a->finding_keys, &a->ordered_keys};
  size_t bytes = sizeof *a + a->bytes + a->finding_capacity * sizeof *a->findings;
  for (size_t i = 0; i < AUDIT_ASSUMED; i++)
    bytes += a->assumed[i].before.count * sizeof(uint64_t);
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
    bytes += tables[i]->capacity * sizeof *tables[i]->at;
  bytes +=
      a->events.count * (sizeof(event) + sizeof(clock_copy) + a->slot_count * sizeof(uint64_t));
  return bytes + a->stream_count * (sizeof(stream) + a->slot_count * sizeof(uint64_t));
}
