/* contents.h: where the contents of live memory are: in device memory, or in host memory while the
 * pages are unmapped. */
#ifndef ESPER_SIM_CONTENTS_H
#define ESPER_SIM_CONTENTS_H

#include "accesses.h"

/* ---- host memory ----------------------------------------------------------- */

esper_status sim_host_new(sim *s, int device, size_t size, void **memory);
esper_status sim_host_give_back(sim *s, int device, void *memory);
/* Whether all of this is host memory of the driver. */
int sim_host_has(const sim *s, const void *at, size_t size);
/* Reports, naming `who`, and returns 0 if parked bytes are there. */
int sim_host_is_idle(sim *s, const char *who, uintptr_t host, size_t size);
/* What was copied there is a copy no more. */
void sim_host_forget_copies(sim *s, uintptr_t host, size_t size);
/* Copies when the operation executes, if addresses are host memory. */
void sim_copy_execute(const sim *s, const sim_op *op);

/* ---- pages ------------------------------------------------------------------ */

/* The page at `address` is unmapped, or was mapped again. */
void sim_contents_leave(sim *s, sim_physical *p, uintptr_t address);
void sim_contents_return(sim *s, sim_physical *p, uintptr_t address);

/* The owner of the live allocation that begins at `address` and sleeps there; 0: none. */
uint64_t sim_parked_owner(const sim *s, uintptr_t address);
/* Whether any of the owner's memory sleeps; and forgets its contents. */
int sim_is_parked(const sim *s, uint64_t owner);
void sim_parked_forget(sim *s, uint64_t owner);
/* These bytes are parked no more. Reports, and returns 0, if they do not come back from where they
 * are parked. `host` 0: they were lost, and are filled with zeros. */
int sim_parked_come_back(sim *s, uintptr_t address, size_t size, uintptr_t host, uint64_t owner);

void sim_contents_destroy(sim *s);

#endif
