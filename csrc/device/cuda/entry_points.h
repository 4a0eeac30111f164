/* entry_points.h: the table of the functions of libcuda that are called. */
#ifndef ESPER_CUDA_ENTRY_POINTS_H
#define ESPER_CUDA_ENTRY_POINTS_H

#include <stdbool.h>
#include <stddef.h>

#include "api.h"

/* load.c fills it. NULL: this driver does not have the function. */
extern cuda_api libcuda;

typedef struct cuda_entry {
  const char *name;
  int version;
  bool required;
  size_t offset; /* in cuda_api */
} cuda_entry;

enum {
#define COUNT(name, version, need, parameters) +1
  CUDA_ENTRY_COUNT = CUDA_ENTRY_POINTS(COUNT)
#undef COUNT
};

extern const cuda_entry cuda_entries[CUDA_ENTRY_COUNT];

/* The address of the function's pointer in `libcuda`. */
void **cuda_entry_slot(int index);

#endif
