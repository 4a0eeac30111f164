/* imported.h: a range of addresses with pages of other processes. */
#ifndef ESPER_IMPORTED_H
#define ESPER_IMPORTED_H

#include "../base/types.h"

struct import {
  uintptr_t address;
  size_t size;
  size_t mapped; /* bytes of it */
  bool closed;   /* nobody is given the address any more */
  import_t *next;
  size_t page_count; /* of those that the driver has not got back */
  struct {
    uint64_t handle;
    size_t size;
    bool mapped;
  } pages[];
};

#endif
