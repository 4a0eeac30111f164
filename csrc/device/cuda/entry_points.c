/* entry_points.c: the functions of libcuda that we call, in a table. */
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
