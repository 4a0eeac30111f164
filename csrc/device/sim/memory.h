/* memory.h: physical memory: classic allocations, and pages. */
#ifndef ESPER_SIM_MEMORY_H
#define ESPER_SIM_MEMORY_H

#include "state.h"

void sim_memory_destroy(sim *s);
esper_status sim_memory_new(sim *s, int device, size_t size, uintptr_t *address);
esper_status sim_memory_give_back(sim *s, int device, uintptr_t address);
esper_status sim_range_new(sim *s, int device, size_t size, uintptr_t *address);
esper_status sim_range_give_back(sim *s, int device, uintptr_t address, size_t size);
/* Whether some of these addresses are reserved, and have no page. */
int sim_lacks_pages(sim *s, uintptr_t address, size_t size);
esper_status sim_page_new(sim *s, int device, size_t size, uint64_t *page);
esper_status sim_page_give_back(sim *s, int device, uint64_t page);
esper_status sim_page_put(sim *s, int device, uintptr_t address, size_t size, uint64_t page,
                          uint64_t access);
esper_status sim_page_open(sim *s, int device, uintptr_t address, size_t size, int peer);
esper_status sim_page_take(sim *s, int device, uintptr_t address, size_t size);
esper_status sim_page_name(sim *s, int device, uint64_t page, esper_page_name *name);
esper_status sim_page_unname(sim *s, int device, const esper_page_name *name);
esper_status sim_page_named(sim *s, int device, const esper_page_name *name, uint64_t *page);

#endif
