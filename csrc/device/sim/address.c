/* address.c: addresses, and which of them have memory.
 *
 * Spans say which addresses have memory; they are sorted and do not overlap.
 * A page may stand behind several spans. Addresses given back are handed out
 * again for the next request of the same size, as drivers do. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "address.h"

#include <string.h>
#include <sys/mman.h>

#include "base.h"

enum { HOLES = 64 };
static const size_t ALIGNMENT = (size_t)2 << 20; /* of every new address */
static const uintptr_t FIRST = (uintptr_t)0x7 << 40;

static size_t round_up(size_t size, size_t to)
{
  return (size + to - 1) / to * to;
}

/* The first span that begins after `address`. */
static size_t span_after(const sim_memory *m, uintptr_t address)
{
  size_t low = 0, high = m->span_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (m->spans[middle].begin <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

sim_span *sim_span_find(sim *s, uintptr_t address)
{
  size_t i = span_after(&s->memory, address);
  if (i == 0 || address >= s->memory.spans[i - 1].end)
    return NULL;
  return &s->memory.spans[i - 1];
}

int sim_span_overlaps(const sim *s, uintptr_t address, size_t size)
{
  const sim_memory *m = &s->memory;
  size_t i = span_after(m, address + size - 1);
  return i > 0 && m->spans[i - 1].end > address;
}

void sim_span_insert(sim *s, uintptr_t address, sim_physical *physical, uint64_t access)
{
  sim_memory *m = &s->memory;
  m->spans = sim_grow(m->spans, m->span_count, &m->span_capacity, sizeof *m->spans);
  size_t i = span_after(m, address);
  memmove(&m->spans[i + 1], &m->spans[i], (m->span_count - i) * sizeof *m->spans);
  m->spans[i] = (sim_span){address, address + physical->size, physical, access};
  m->span_count++;
}

void sim_span_remove(sim *s, const sim_span *span)
{
  sim_memory *m = &s->memory;
  size_t i = (size_t)(span - m->spans);
  m->span_count--;
  memmove(&m->spans[i], &m->spans[i + 1], (m->span_count - i) * sizeof *m->spans);
}

uintptr_t sim_closed_to(sim *s, int device, uintptr_t address, size_t size)
{
  for (uintptr_t a = address; a < address + size;) {
    const sim_span *span = sim_span_find(s, a);
    if (!span || !(span->access >> device & 1))
      return a;
    a = span->end;
  }
  return 0;
}

/* 0: there are none. */
static uintptr_t address_take(sim *s, size_t size)
{
  sim_memory *m = &s->memory;
  size_t rounded = round_up(size, ALIGNMENT);
  for (size_t i = m->hole_count; i-- > 0;)
    if (m->holes[i].size == size) {
      uintptr_t address = m->holes[i].begin;
      m->holes[i] = m->holes[--m->hole_count];
      return address;
    }
  if (m->next == 0)
    m->next = FIRST;
  if (rounded < size || rounded > UINTPTR_MAX - m->next)
    return 0;
  uintptr_t address = m->next;
  m->next += rounded;
  return address;
}

static void address_put(sim *s, uintptr_t address, size_t size)
{
  sim_memory *m = &s->memory;
  if (m->hole_count == HOLES) /* forget the oldest, which is then never used again */
    memmove(m->holes, m->holes + 1, --m->hole_count * sizeof *m->holes);
  m->holes = sim_grow(m->holes, m->hole_count, &m->hole_capacity, sizeof *m->holes);
  m->holes[m->hole_count++] = (sim_hole){address, size};
}

/* Takes host addresses, usable at once or only reserved. 0: there are none. */
static uintptr_t host_take(size_t size, int usable)
{
  /* Aligned like the fake ones: maps more, then unmaps the ends. */
  size_t more = round_up(size, 4096) + ALIGNMENT;
  if (more < size)
    return 0;
  char *begin = mmap(NULL, more, usable ? PROT_READ | PROT_WRITE : PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED)
    return 0;
  uintptr_t aligned = round_up((uintptr_t)begin, ALIGNMENT);
  size_t head = aligned - (uintptr_t)begin;
  size_t tail = more - head - round_up(size, 4096);
  if (head)
    munmap(begin, head);
  if (tail)
    munmap((char *)(aligned + round_up(size, 4096)), tail);
  return aligned;
}

static void host_put(uintptr_t address, size_t size)
{
  munmap((void *)address, round_up(size, 4096));
}

uintptr_t sim_addresses_take(sim *s, size_t size, int usable)
{
  return s->options.backed ? host_take(size, usable) : address_take(s, size);
}

void sim_addresses_put(sim *s, uintptr_t address, size_t size)
{
  if (s->options.backed)
    host_put(address, size);
  else
    address_put(s, address, size);
}
