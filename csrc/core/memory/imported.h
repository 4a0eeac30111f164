/* imported.h: a range of addresses into which pages of other processes are mapped. */
#ifndef ESPER_IMPORTED_H
#define ESPER_IMPORTED_H

#include "../base/types.h"

struct import {
  uintptr_t address;
  size_t size;
  size_t mapped; /* mapped bytes */
  bool closed;   /* the user has closed it */
  import_t *next;
  size_t page_count; /* of pages not yet given back to the driver */
  struct imported_page {
    uint64_t handle;
    size_t size;
    bool mapped;
  } pages[];
};

#endif
