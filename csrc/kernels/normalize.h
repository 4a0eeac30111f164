/* Launches the kernels of the normalisers (normalize.cu). Valid C.
 *
 * A normaliser's state is what it remembers of each feature. Values are rows of
 * features, dense. Each launch is asynchronous on the stream, waits for nothing, can be
 * captured into a graph, and allocates nothing: what scratch memory it wants, the caller
 * passes.
 *
 * A value that is not finite, that the mask leaves out, or whose weight is not a finite
 * number above 0, does not contribute to its feature. A row counts when at least one of
 * its values contributes.
 */
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
  float *mean;     /* the same rounded. One that is no longer the rounded moment was */
  float *variance; /* written by the user, and is believed */
  int64_t *count;  /* one: rows that counted */
  int64_t features;
} esper_normalizer_state;

typedef struct esper_normalizer_batch {
  const void *values; /* rows x features */
  enum esper_value_type type;
  int64_t rows;
  const unsigned char *mask;   /* NULL, or 0 where a value does not count */
  const double *weights;       /* NULL, or the values' weights */
  int mask_each, weights_each; /* 1: one for each value; 0: one for each row */
} esper_normalizer_batch;

typedef struct esper_normalizer_rule {
  double momentum; /* below 0: none */
  double warm_up;  /* weight from which momentum and scaling act */
  double epsilon;
  double clip; /* results are held within -clip and clip; infinity: they are not */
  enum esper_scaling scaling;
  int inverse; /* undo the scaling instead; nothing is clipped */
} esper_normalizer_rule;

/* How many doubles of scratch an update of this size wants; may be 0. */
size_t esper_normalizer_scratch(const esper_normalizer_state *, const esper_normalizer_batch *);

/* Takes a batch in. With `out` (rows x features: doubles for doubles, else floats) also
 * normalises it by the new state, in the same launch. */
cudaError_t esper_normalizer_update(const esper_normalizer_state *, const esper_normalizer_batch *,
                                    const esper_normalizer_rule *, void *out, double *scratch,
                                    cudaStream_t);

/* Normalises a batch by the state as it is. Mask and weights are not looked at. */
cudaError_t esper_normalizer_apply(const esper_normalizer_state *, const esper_normalizer_batch *,
                                   const esper_normalizer_rule *, void *out, cudaStream_t);

#ifdef __cplusplus
}
#endif

#endif
