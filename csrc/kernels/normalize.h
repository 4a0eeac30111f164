/* normalize.h: launches the kernels of the normalisers (normalize.cu). Valid C.
 *
 * A normaliser's state is what it remembers of each feature. Values are dense rows of features.
 * Each launch is asynchronous on the stream, waits for nothing, can be captured into a graph and
 * allocates nothing; the caller passes scratch memory.
 *
 * A value contributes to its feature if it is finite, the mask does not leave it out, and its
 * weight is a finite number above 0. A row counts if at least one of its values contributes. */
#ifndef ESPER_KERNELS_NORMALIZE_H
#define ESPER_KERNELS_NORMALIZE_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum esper_value_type { ESPER_FLOAT, ESPER_DOUBLE, ESPER_HALF, ESPER_BFLOAT16 };

enum esper_scaling {
  ESPER_CENTERED, /* (x - mean) / sqrt(variance + epsilon) */
  ESPER_SCALED,   /* x / sqrt(variance + epsilon); x while the weight is below warm_up */
  ESPER_SAMPLE    /* x / max(epsilon, sample deviation); x while the weight is below warm_up */
};

/* Device memory; only an update writes it. */
typedef struct esper_normalizer_state {
  double *moments; /* 3 x features: means, population variances, weights */
  float *mean;     /* the same, rounded. One that differs from the rounded moment */
  float *variance; /* was written by the user, and is used instead */
  int64_t *count;  /* a single number: rows that counted */
  int64_t features;
} esper_normalizer_state;

typedef struct esper_normalizer_batch {
  const void *values; /* rows x features */
  enum esper_value_type type;
  int64_t rows;
  const unsigned char *mask;   /* NULL, or 0 for values that do not count */
  const double *weights;       /* NULL, or the values' weights */
  int mask_each, weights_each; /* 1: one for each value; 0: one for each row */
} esper_normalizer_batch;

typedef struct esper_normalizer_rule {
  double momentum; /* below 0: no momentum */
  double warm_up;  /* weight from which momentum and scaling act */
  double epsilon;
  double clip; /* results are limited to -clip and clip; infinity: they are not */
  enum esper_scaling scaling;
  int inverse; /* undo the scaling instead; nothing is clipped */
} esper_normalizer_rule;

/* The doubles of scratch memory that an update of this size needs; may be 0. */
size_t esper_normalizer_scratch(const esper_normalizer_state *, const esper_normalizer_batch *);

/* Merges a batch into the state. If `out` is given (rows x features: doubles for doubles, otherwise
 * floats), the same launch also normalises the batch by the new state. */
cudaError_t esper_normalizer_update(const esper_normalizer_state *, const esper_normalizer_batch *,
                                    const esper_normalizer_rule *, void *out, double *scratch,
                                    cudaStream_t);

/* Normalises a batch by the unchanged state, ignoring mask and weights. */
cudaError_t esper_normalizer_apply(const esper_normalizer_state *, const esper_normalizer_batch *,
                                   const esper_normalizer_rule *, void *out, cudaStream_t);

#ifdef __cplusplus
}
#endif

#endif
