/* contents.c: host memory, and what becomes of live memory whose page is unmapped.
 *
 * A stretch remembers where the host has a copy of its bytes, from the copy until the next access.
 * Unmapping live memory without such a copy is a failure, unless the program allows the loss. Until
 * the page is mapped again the bytes are parked: nobody may write over the copy. Then they must
 * come back from exactly there, before anybody accesses them. */
#include "contents.h"

#include <stdlib.h>
#include <string.h>

#include "address.h"
#include "base.h"

/* ---- host memory ---------------------------------------------------------- */

static int overlap(uintptr_t a, size_t a_size, uintptr_t b, size_t b_size)
{
  return a < b + b_size && b < a + a_size;
}

int sim_host_is_idle(sim *s, const char *who, uintptr_t host, size_t size)
{
  for (size_t i = 0; i < s->parked_count; i++) {
    const sim_parked *k = &s->parked[i];
    if (!k->host || !overlap(k->host, k->size, host, size))
      continue;
    sim_report(s, "%s: host memory has the only copy of what sleeps at 0x%zx: ", who,
               (size_t)k->address);
    sim_report_owner(s, k->owner);
    sim_report(s, "\n");
    return 0;
  }
  return 1;
}

void sim_host_forget_copies(sim *s, uintptr_t host, size_t size)
{
  for (size_t i = 0; s->options.oracle && i < s->memory.span_count; i++) {
    sim_physical *p = s->memory.spans[i].physical;
    for (size_t k = 0; k < p->stretch_count; k++) {
      sim_stretch *t = &p->stretches[k];
      if (t->copy && overlap(t->copy, t->end - t->begin, host, size))
        t->copy = 0;
    }
  }
}

esper_status sim_host_new(sim *s, int device, size_t size, void **memory)
{
  char *taken = size ? malloc(size) : NULL;
  if (!taken)
    return sim_refuse(ESPER_OUT_OF_MEMORY, "sim: no host memory for %zu bytes", size);
  s->host_blocks = sim_grow(s->host_blocks, s->host_block_count, &s->host_block_capacity,
                            sizeof *s->host_blocks);
  s->host_blocks[s->host_block_count++] = (sim_host_block){taken, size};
  s->devices[device].alive.host_blocks++;
  s->devices[device].alive.host_bytes += size;
  *memory = taken;
  return ESPER_OK;
}

static sim_host_block *host_find(const sim *s, const char *at, size_t size)
{
  for (size_t i = 0; i < s->host_block_count; i++) {
    sim_host_block *b = &s->host_blocks[i];
    if (at >= b->memory && size <= b->size && (size_t)(at - b->memory) <= b->size - size)
      return b;
  }
  return NULL;
}

int sim_host_has(const sim *s, const void *at, size_t size)
{
  return host_find(s, at, size) != NULL;
}

esper_status sim_host_give_back(sim *s, int device, void *memory)
{
  sim_host_block *b = host_find(s, memory, 1); /* with 0, the block before may do as well */
  if (!b || b->memory != memory) {
    sim_report(s, "host_free: %p is not the start of host memory of the driver\n", memory);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: host_free of a bad address");
  }
  if (!sim_host_is_idle(s, "host_free", (uintptr_t)memory, b->size))
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: host_free of a copy");
  sim_host_forget_copies(s, (uintptr_t)memory, b->size);
  s->devices[device].alive.host_blocks--;
  s->devices[device].alive.host_bytes -= b->size;
  *b = s->host_blocks[--s->host_block_count];
  free(memory);
  return ESPER_OK;
}

/* ---- parked bytes ---------------------------------------------------------- */

static sim_parked *park(sim *s)
{
  s->parked = sim_grow(s->parked, s->parked_count, &s->parked_capacity, sizeof *s->parked);
  return &s->parked[s->parked_count++];
}

/* The parked bytes that begin at `address`, cut off at `end`. NULL: none. */
static sim_parked *unpark_at(sim *s, uintptr_t address, uintptr_t end)
{
  for (size_t i = 0; i < s->parked_count; i++) {
    sim_parked *k = &s->parked[i];
    if (address < k->address || address >= k->address + k->size)
      continue;
    if (address > k->address) { /* cut off what is before */
      size_t size = address - k->address;
      sim_parked rest = *k;
      k->size = size;
      rest.address += size;
      rest.size -= size;
      rest.host += rest.host ? size : 0;
      k = park(s);
      *k = rest;
    }
    if (k->address + k->size > end) {
      size_t size = end - k->address;
      sim_parked rest = *k;
      k->size = size;
      rest.address += size;
      rest.size -= size;
      rest.host += rest.host ? size : 0;
      i = (size_t)(k - s->parked);
      *park(s) = rest;
      k = &s->parked[i];
    }
    return k;
  }
  return NULL;
}

uint64_t sim_parked_owner(const sim *s, uintptr_t address)
{
  for (size_t i = 0; i < s->parked_count; i++)
    if (s->parked[i].address == address &&
        sim_owner_slot(s, s->parked[i].owner)->address == address)
      return s->parked[i].owner;
  return 0;
}

int sim_is_parked(const sim *s, uint64_t owner)
{
  for (size_t i = 0; i < s->parked_count; i++)
    if (s->parked[i].owner == owner)
      return 1;
  return 0;
}

void sim_parked_forget(sim *s, uint64_t owner)
{
  for (size_t i = s->parked_count; i-- > 0;)
    if (s->parked[i].owner == owner)
      s->parked[i] = s->parked[--s->parked_count];
}

void sim_contents_leave(sim *s, sim_physical *p, uintptr_t address)
{
  for (size_t i = 0; i < p->stretch_count; i++) {
    sim_stretch *t = &p->stretches[i];
    if (!t->live || !sim_is_behind(s, p, address, t->owner))
      continue;
    uintptr_t host = s->may_lose ? 0 : t->copy;
    if (!t->absent)
      *park(s) = (sim_parked){address + t->begin, t->end - t->begin, t->owner, host};
    t->live = 0; /* of the page, which may be mapped elsewhere, too */
    t->absent = 0;
    t->copy = 0;
  }
}

void sim_contents_return(sim *s, sim_physical *p, uintptr_t address)
{
  for (size_t i = 0; i < s->parked_count; i++) {
    const sim_parked *k = &s->parked[i];
    uintptr_t begin = k->address > address ? k->address : address;
    uintptr_t end =
        k->address + k->size < address + p->size ? k->address + k->size : address + p->size;
    if (begin >= end)
      continue;
    size_t first = sim_stretch_cut(p, begin - address);
    size_t last = sim_stretch_cut(p, end - address);
    for (size_t n = first; n < last; n++) {
      p->stretches[n].owner = k->owner;
      p->stretches[n].live = 1;
      p->stretches[n].absent = 1;
    }
  }
}

int sim_parked_come_back(sim *s, uintptr_t address, size_t size, uintptr_t host, uint64_t owner)
{
  for (uintptr_t a = address; a < address + size;) {
    sim_parked *k = unpark_at(s, a, address + size);
    if (!k || k->owner != owner || k->host != (host ? host + (a - address) : 0)) {
      sim_report(s, "memory at 0x%zx that slept gets other contents than it had: ", (size_t)a);
      sim_report_owner(s, owner);
      sim_report(s, "\n");
      return 0;
    }
    a += k->size;
    *k = s->parked[--s->parked_count];
  }
  return 1;
}

void sim_copy_execute(const sim *s, const sim_op *op)
{
  if (!s->options.backed)
    return;
  if (op->kind == SIM_OP_TO_HOST)
    memcpy(op->host, (const void *)op->address, op->size);
  else if (op->kind == SIM_OP_TO_DEVICE)
    memcpy((void *)op->address, op->host, op->size);
  else
    memset((void *)op->address, 0, op->size);
}

void sim_contents_destroy(sim *s)
{
  for (size_t i = 0; i < s->host_block_count; i++)
    free(s->host_blocks[i].memory);
  free(s->host_blocks);
  free(s->parked);
}
