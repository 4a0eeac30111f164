/* captured.c: what a capture collects. */
#include "captured.h"

#include "footprint.h"

/* How far back an equal access is looked for: an operator and those that it calls. */
enum { BACK = 8 };

graph *graph_of(const audit *a, const block *b)
{
  return b->capture ? table_get(&a->owners, b->capture) : NULL;
}

uint64_t audit_generation(const audit *a, uintptr_t address)
{
  const block *b = table_get(&a->blocks, address);
  const graph *g = b ? graph_of(a, b) : NULL;
  return g ? g->generation : 0;
}

void graph_capture_access(audit *a, capture *c, const block *b, const audit_access *access)
{
  for (size_t i = c->count; i-- > 0 && i + BACK >= c->count;) {
    const captured_access *old = &c->accesses[i];
    if (old->serial == b->serial && old->writes == access->writes &&
        footprint_covers(&old->bytes, &access->bytes))
      return;
  }
  if (!audit_reserve((void **)&c->accesses, &c->capacity, c->count, sizeof *c->accesses)) {
    a->lost = 1;
    return;
  }
  c->accesses[c->count++] =
      (captured_access){b->address, b->serial, access->bytes, access->place, access->writes};
}

void graph_own(audit *a, capture *c, const block *b)
{
  if (!audit_reserve((void **)&c->blocks, &c->block_capacity, c->block_count, sizeof *c->blocks)) {
    a->lost = 1;
    return;
  }
  c->blocks[c->block_count++] = (owned_block){b->address, b->serial};
}
