/* gather.h: one launch that gathers rows of several tensors into the memory of many environments.
 *
 * A column is one tensor of samples. The rows of a batch are numbered through all environments: the
 * first `larger` environments get `size` + 1 rows each, the others `size`. Row r is sample
 * order[start + r], or offset + start + r if there is no order. Each environment has a destination
 * of its own for each column. */
#ifndef ESPER_KERNELS_GATHER_H
#define ESPER_KERNELS_GATHER_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  /* What fits into a launch's parameters. More goes through device memory. */
  ESPER_GATHER_COLUMNS = 8,
  ESPER_GATHER_DESTINATIONS = 256, /* environments times columns */
  /* Bits of a sample's hash: 21 for the window's top, 21 for its left, the rest for the flip. */
  ESPER_GATHER_WINDOW_BITS = 21,
  /* A launch counts units in 31 bits: the rows times a column's row_units must stay below this. */
  ESPER_GATHER_MAX_UNITS = 1u << 30
};

enum { ESPER_GATHER_U8, ESPER_GATHER_F16, ESPER_GATHER_BF16, ESPER_GATHER_F32 };

enum {
  ESPER_GATHER_COPY,   /* rows as they are */
  ESPER_GATHER_CONVERT /* element by element, see below */
};

/* Division by a constant, for dividends below 2^31. */
typedef struct esper_divisor {
  uint32_t by;
  uint32_t multiplier;
  uint32_t shift;
} esper_divisor;

/* One column. A unit is what a thread moves at once.
 *
 * CONVERT treats a row as an image of channels x height x width (other rows as 1 x 1 x n or
 * channels x 1 x n). It cuts a window of the image's size out of the image with a border of `crop`
 * zeros, flips it, normalises it in float32 and converts it to the result's type. */
typedef struct esper_gather_column {
  const void *source;     /* [samples, row], dense */
  const float *constants; /* device memory. For u8: [channels, 256], the value of each byte;
                             otherwise [2, channels], mean and std. NULL: values are kept */
  int64_t row_bytes;      /* of the source */
  esper_divisor row_units;
  uint32_t unit_bytes;     /* of the result: 16, or one element. COPY: 16, 8, 4, 2, 1 */
  uint32_t first_block;    /* set by the launch */
  uint32_t flip_threshold; /* of 2^22 */
  int32_t crop;
  esper_divisor channels, height, width;
  uint8_t kind;
  uint8_t source_type;
  uint8_t result_type;
  uint8_t source_last; /* rows are height x width x channels */
  uint8_t result_last;
} esper_gather_column;

typedef struct esper_gather_batch {
  const int64_t *order; /* device memory, or null */
  int64_t start;
  int64_t offset;
  uint64_t seed;         /* already mixed: see transform.py */
  uint32_t environments; /* with at least one row each */
  uint32_t size;
  uint32_t larger;
  uint32_t columns;
  uint32_t rows; /* set by the launch, as are the following */
  esper_divisor by_size, by_larger_size;
} esper_gather_batch;

/* Fills in a divisor; 0 counts as 1. */
esper_divisor esper_divisor_of(uint32_t by);

/* Enqueues one kernel. `columns` has batch->columns entries; `destinations` has batch->environments
 * times that many, environment by environment. Both lie in host memory and are not needed after
 * this returns.
 *
 * Beyond the limits above, `remote` must be device memory of esper_gather_remote_bytes() and
 * `staging` pinned host memory of that size, both kept until the stream has passed this point.
 * Otherwise both may be NULL. */
cudaError_t esper_gather_launch(esper_gather_batch *batch, esper_gather_column *columns,
                                void *const *destinations, void *remote, void *staging,
                                cudaStream_t stream);

/* 0 if everything fits into the launch's parameters. */
size_t esper_gather_remote_bytes(uint32_t columns, uint32_t environments);

#ifdef __cplusplus
}
#endif

#endif
