/* memory.c: physical memory: classic allocations, and pages that are mapped into
 * reserved ranges. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "accesses.h"
#include "address.h"
#include "base.h"
#include "contents.h"

static int capacity_left(sim *s, int device, size_t size)
{
  sim_device *d = &s->devices[device];
  return d->alive.bytes <= d->capacity && size <= d->capacity - d->alive.bytes;
}

static esper_status out_of_memory(sim *s, int device, size_t size)
{
  sim_device *d = &s->devices[device];
  return sim_refuse(ESPER_OUT_OF_MEMORY,
                    "sim: out of memory: %zu bytes asked of device %d, which "
                    "has %zu of %zu in use",
                    size, device, d->alive.bytes, d->capacity);
}

static esper_status out_of_addresses(size_t size)
{
  return sim_refuse(ESPER_OUT_OF_MEMORY, "sim: no addresses are left for %zu bytes", size);
}

static sim_physical *physical_new(sim *s, int device, size_t size)
{
  sim_physical *p = calloc(1, sizeof *p);
  if (!p)
    abort();
  p->device = device;
  p->size = size;
  if (s->options.oracle)
    sim_physical_init(s, p);
  s->devices[device].alive.bytes += size;
  return p;
}

static void physical_free(sim *s, sim_physical *p)
{
  s->devices[p->device].alive.bytes -= p->size;
  sim_physical_destroy(s, p);
  free(p);
}

/* ---- classic allocations ------------------------------------------------ */

esper_status sim_memory_new(sim *s, int device, size_t size, uintptr_t *address)
{
  if (size == 0)
    return sim_refuse(ESPER_INVALID, "sim: memory_alloc of 0 bytes");
  if (!capacity_left(s, device, size))
    return out_of_memory(s, device, size);
  uintptr_t at = sim_addresses_take(s, size, 1);
  if (!at)
    return out_of_addresses(size);
  sim_span_insert(s, at, physical_new(s, device, size), UINT64_MAX);
  s->devices[device].alive.allocations++;
  *address = at;
  return ESPER_OK;
}

esper_status sim_memory_give_back(sim *s, int device, uintptr_t address)
{
  sim_span *span = sim_span_find(s, address);
  if (!span || span->begin != address || span->physical->page || span->physical->device != device) {
    sim_report(s,
               "memory_free: 0x%zx is not the start of an allocation of device "
               "%d\n",
               (size_t)address, device);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: memory_free of a bad address");
  }
  if (sim_physical_is_busy(s, span->physical, address, "memory_free"))
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: memory_free of busy memory");
  size_t size = span->physical->size;
  physical_free(s, span->physical);
  sim_span_remove(s, span);
  s->devices[device].alive.allocations--;
  sim_addresses_put(s, address, size);
  return ESPER_OK;
}

/* ---- reserved ranges ---------------------------------------------------- */

static esper_status check_granularity(sim *s, const char *who, size_t value)
{
  if (!s->options.virtual_memory)
    return sim_refuse(ESPER_UNSUPPORTED, "sim: the device cannot map pages");
  if (value == 0 || value % s->options.page_granularity) {
    sim_report(s, "%s: %zu is no multiple of the granularity, %zu\n", who, value,
               s->options.page_granularity);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: %s: bad size", who);
  }
  return ESPER_OK;
}

static int range_find(const sim_memory *m, uintptr_t address, size_t *at)
{
  for (size_t i = 0; i < m->range_count; i++)
    if (address >= m->ranges[i].begin && address < m->ranges[i].end) {
      *at = i;
      return 1;
    }
  return 0;
}

esper_status sim_range_new(sim *s, int device, size_t size, uintptr_t *address)
{
  sim_memory *m = &s->memory;
  esper_status status = check_granularity(s, "range_reserve", size);
  if (status)
    return status;
  uintptr_t at = sim_addresses_take(s, size, 0);
  if (!at)
    return out_of_addresses(size);
  m->ranges = sim_grow(m->ranges, m->range_count, &m->range_capacity, sizeof *m->ranges);
  m->ranges[m->range_count++] = (sim_range){at, at + size, device};
  s->devices[device].alive.ranges++;
  *address = at;
  return ESPER_OK;
}

esper_status sim_range_give_back(sim *s, int device, uintptr_t address, size_t size)
{
  sim_memory *m = &s->memory;
  size_t at;
  esper_status status = check_granularity(s, "range_free", size);
  if (status)
    return status;
  if (!range_find(m, address, &at) || m->ranges[at].begin != address ||
      m->ranges[at].end != address + size || m->ranges[at].device != device) {
    sim_report(s, "range_free: [0x%zx, +%zu) is not a reserved range\n", (size_t)address, size);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: range_free of a bad range");
  }
  if (sim_span_overlaps(s, address, size)) {
    sim_report(s, "range_free: [0x%zx, +%zu) still has pages mapped\n", (size_t)address, size);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: range_free of a mapped range");
  }
  m->ranges[at] = m->ranges[--m->range_count];
  s->devices[device].alive.ranges--;
  sim_addresses_put(s, address, size);
  return ESPER_OK;
}

int sim_lacks_pages(sim *s, uintptr_t address, size_t size)
{
  size_t at;
  for (uintptr_t a = address; a < address + size; a = (a / 4096 + 1) * 4096)
    if (range_find(&s->memory, a, &at) && !sim_span_find(s, a))
      return 1;
  return 0;
}

/* ---- pages -------------------------------------------------------------- */

static sim_physical *page_find(sim *s, uint64_t page)
{
  uint32_t i = (uint32_t)page;
  if (i == 0 || i > s->memory.page_count)
    return NULL;
  sim_physical *p = s->memory.pages[i - 1];
  return p && p->page == page && p->handles ? p : NULL;
}

static void page_forget(sim *s, sim_physical *p)
{
  sim_memory *m = &s->memory;
  m->pages[(uint32_t)p->page - 1] = NULL;
  if (s->options.backed)
    fallocate(m->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->file_offset,
              (off_t)p->size);
  physical_free(s, p);
}

/* Frees the memory if neither a mapping nor a handle refers to it any more. */
static void page_free_if_unused(sim *s, sim_physical *p)
{
  if (p->mappings || p->handles)
    return;
  if (p->name) {
    sim_report(s, "a page goes whose name is still offered\n");
    s->devices[p->device].alive.names--;
  }
  page_forget(s, p);
}

esper_status sim_page_new(sim *s, int device, size_t size, uint64_t *page)
{
  sim_memory *m = &s->memory;
  esper_status status = check_granularity(s, "page_create", size);
  if (status)
    return status;
  if (!capacity_left(s, device, size))
    return out_of_memory(s, device, size);
  size_t offset = m->file_size;
  if (s->options.backed) {
    if (m->file < 0)
      m->file = memfd_create("sim", 0);
    if (m->file < 0 || ftruncate(m->file, (off_t)(offset + size)))
      return out_of_memory(s, device, size);
    m->file_size += size; /* offsets are never used again: the file is sparse */
  }
  uint32_t i = 0;
  while (i < m->page_count && m->pages[i])
    i++;
  if (i == m->page_count) {
    m->pages = sim_grow32(m->pages, m->page_count, &m->page_capacity, sizeof *m->pages);
    m->page_count++;
  }
  sim_physical *p = physical_new(s, device, size);
  p->page = (uint64_t)++m->page_turn << 32 | (i + 1);
  p->file_offset = offset;
  p->handles = 1;
  p->kept = s->keeps;
  m->pages[i] = p;
  s->devices[device].alive.pages++;
  *page = p->page;
  return ESPER_OK;
}

esper_status sim_page_give_back(sim *s, int device, uint64_t page)
{
  sim_physical *p = page_find(s, page);
  if (!p || p->device != device) {
    sim_report(s, "page_release: there is no page %llx on device %d\n", (unsigned long long)page,
               device);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_release of a bad page");
  }
  p->handles--;
  s->devices[device].alive.pages--;
  page_free_if_unused(s, p);
  return ESPER_OK;
}

esper_status sim_page_name(sim *s, int device, uint64_t page, esper_page_name *name)
{
  sim_physical *p = page_find(s, page);
  if (!p || p->device != device || p->name) {
    sim_report(s, "page_export: there is no page %llx on device %d, or it has a name\n",
               (unsigned long long)page, device);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_export of a bad page");
  }
  if (p->kept)
    return sim_refuse(ESPER_UNSUPPORTED, "sim: the page cannot be exported");
  p->name = ++s->last_name;
  *name = (esper_page_name){.process = 1, .key = 2, .number = p->name};
  s->devices[device].alive.names++;
  return ESPER_OK;
}

/* The page that has the name and still has a handle. */
static sim_physical *named(sim *s, const esper_page_name *name)
{
  for (uint32_t i = 0; i < s->memory.page_count; i++) {
    sim_physical *p = s->memory.pages[i];
    if (p && p->name && p->name == name->number && name->process == 1 && name->key == 2)
      return p;
  }
  return NULL;
}

esper_status sim_page_unname(sim *s, int device, const esper_page_name *name)
{
  sim_physical *p = named(s, name);
  if (!p || p->device != device) {
    sim_report(s, "page_unexport: nothing has the name %llu\n", (unsigned long long)name->number);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_unexport of a bad name");
  }
  p->name = 0;
  s->devices[device].alive.names--;
  return ESPER_OK;
}

esper_status sim_page_named(sim *s, int device, const esper_page_name *name, uint64_t *page)
{
  sim_physical *p = named(s, name);
  if (!p || p->device != device || p->size != name->size)
    return sim_refuse(ESPER_INVALID, "sim: nobody offers a page of that name");
  p->handles++;
  s->devices[device].alive.pages++;
  *page = p->page;
  return ESPER_OK;
}

esper_status sim_page_put(sim *s, int device, uintptr_t address, size_t size, uint64_t page,
                          uint64_t access)
{
  sim_memory *m = &s->memory;
  size_t at;
  esper_status status = check_granularity(s, "page_map", size);
  if (status)
    return status;
  sim_physical *p = page_find(s, page);
  const char *wrong = NULL;
  if (!p || p->device != device)
    wrong = "no such page on the device";
  else if (p->size != size)
    wrong = "the page has another size";
  else if (!range_find(m, address, &at) || m->ranges[at].end < address + size)
    wrong = "the addresses are not in one reserved range";
  else if (m->ranges[at].device != device)
    wrong = "the range belongs to another device";
  else if ((address - m->ranges[at].begin) % s->options.page_granularity)
    wrong = "the address is not aligned";
  else if (sim_span_overlaps(s, address, size))
    wrong = "a page is there";
  if (wrong) {
    sim_report(s, "page_map of page %llx at [0x%zx, +%zu): %s\n", (unsigned long long)page,
               (size_t)address, size, wrong);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_map: %s", wrong);
  }
  if (s->options.backed &&
      mmap((void *)address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->file,
           (off_t)p->file_offset) == MAP_FAILED)
    return out_of_memory(s, device, size);
  sim_span_insert(s, address, p, access);
  if (s->options.oracle)
    sim_contents_return(s, p, address);
  p->mappings++;
  s->devices[device].alive.mappings++;
  return ESPER_OK;
}

/* Whether [address, address + size) is made of whole pages of the device. */
static int are_pages(sim *s, int device, uintptr_t address, size_t size)
{
  for (uintptr_t a = address; a < address + size;) {
    const sim_span *span = sim_span_find(s, a);
    if (!span || span->begin != a || span->end > address + size || !span->physical->page ||
        span->physical->device != device)
      return 0;
    a = span->end;
  }
  return 1;
}

esper_status sim_page_open(sim *s, int device, uintptr_t address, size_t size, int peer)
{
  esper_status status = check_granularity(s, "page_access", size);
  if (status)
    return status;
  if (!are_pages(s, device, address, size) || peer == device || peer < 0 ||
      peer >= s->options.devices) {
    sim_report(s,
               "page_access of device %d to [0x%zx, +%zu), which are not "
               "whole pages of device %d\n",
               peer, (size_t)address, size, device);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_access: bad addresses");
  }
  if (s->unreachable)
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_access: no way there");
  for (uintptr_t a = address; a < address + size;) {
    sim_span *span = sim_span_find(s, a);
    span->access |= (uint64_t)1 << peer;
    a = span->end;
  }
  return ESPER_OK;
}

esper_status sim_page_take(sim *s, int device, uintptr_t address, size_t size)
{
  esper_status status = check_granularity(s, "page_unmap", size);
  if (status)
    return status;
  /* First check that all of it can be unmapped, then do it. */
  if (!are_pages(s, device, address, size)) {
    sim_report(s, "page_unmap: [0x%zx, +%zu) is not made of whole pages\n", (size_t)address, size);
    return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_unmap: bad addresses");
  }
  for (uintptr_t a = address; a < address + size;) {
    const sim_span *span = sim_span_find(s, a);
    if (sim_physical_is_busy(s, span->physical, a, "page_unmap"))
      return sim_refuse(ESPER_DEVICE_ERROR, "sim: page_unmap: busy memory");
    a = span->end;
  }
  for (uintptr_t a = address; a < address + size;) {
    sim_span *span = sim_span_find(s, a);
    sim_physical *p = span->physical;
    if (s->options.backed &&
        mmap((void *)a, p->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0) == MAP_FAILED)
      abort();
    if (s->options.oracle)
      sim_contents_leave(s, p, a);
    a = span->end;
    sim_span_remove(s, span);
    s->devices[device].alive.mappings--;
    p->mappings--;
    page_free_if_unused(s, p);
  }
  return ESPER_OK;
}

void sim_memory_destroy(sim *s)
{
  sim_memory *m = &s->memory;
  for (size_t i = 0; i < m->span_count; i++) {
    sim_span *span = &m->spans[i];
    if (span->physical->page) {
      if (--span->physical->mappings == 0 && !span->physical->handles)
        page_forget(s, span->physical);
      continue;
    }
    if (s->options.backed)
      sim_addresses_put(s, span->begin, span->physical->size);
    physical_free(s, span->physical);
  }
  for (uint32_t i = 0; i < m->page_count; i++)
    if (m->pages[i])
      physical_free(s, m->pages[i]);
  if (s->options.backed)
    for (size_t i = 0; i < m->range_count; i++)
      sim_addresses_put(s, m->ranges[i].begin, m->ranges[i].end - m->ranges[i].begin);
  if (m->file >= 0)
    close(m->file);
  free(m->spans);
  free(m->ranges);
  free(m->holes);
  free(m->pages);
}
