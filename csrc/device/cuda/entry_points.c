/* entry_points.c: the table of the functions of libcuda that are called. */
#include "entry_points.h"

cuda_api libcuda;

const cuda_entry cuda_entries[] = {
#define REQUIRED true
#define OPTIONAL false
#define ENTRY(name, version, need, parameters) {#name, version, need, offsetof(cuda_api, name)},
    CUDA_ENTRY_POINTS(ENTRY)
#undef ENTRY
#undef REQUIRED
#undef OPTIONAL
};

void **cuda_entry_slot(int index)
{
  return (void **)((char *)&libcuda + cuda_entries[index].offset);
}
