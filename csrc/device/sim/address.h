/* address.h: addresses, and which of them have memory. */
#ifndef ESPER_SIM_ADDRESS_H
#define ESPER_SIM_ADDRESS_H

#include "state.h"

/* The span that holds an address, or NULL. */
sim_span *sim_span_find(sim *s, uintptr_t address);
/* Whether any of [address, address + size) has memory. */
int sim_span_overlaps(const sim *s, uintptr_t address, size_t size);
void sim_span_insert(sim *s, uintptr_t address, sim_physical *physical, uint64_t access);
void sim_span_remove(sim *s, const sim_span *span);
/* The first address in [address, address + size) that the device may not access; 0: none. */
uintptr_t sim_closed_to(sim *s, int device, uintptr_t address, size_t size);
/* Takes unused addresses. If addresses are host memory, they are usable at once or only reserved.
 * 0: there are none. */
uintptr_t sim_addresses_take(sim *s, size_t size, int usable);
void sim_addresses_put(sim *s, uintptr_t address, size_t size);

#endif
