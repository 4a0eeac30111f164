/* Count, mean and spread of a set of numbers, in double precision, and how they combine.
 *
 * For host and device. Nothing here subtracts two large sums of squares:
 *
 * - Numbers are added as deviations from the first of them, K. With n numbers the sum
 *   of squares about K is at most n times the sum about the mean, K being one of them,
 *   so the subtraction loses at most log2(n) bits of 53. (Shifted data: T. F. Chan,
 *   G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance", The
 *   American Statistician 37, 1983.)
 * - Weighted numbers are added one at a time (D. H. D. West, "Updating mean and variance
 *   estimates: an improved method", Communications of the ACM 22, 1979; for equal
 *   weights that is B. P. Welford, Technometrics 4, 1962).
 * - Sets are merged pairwise (Chan, Golub, LeVeque, as above).
 */
#ifndef ESPER_KERNELS_MOMENTS_H
#define ESPER_KERNELS_MOMENTS_H

#ifdef __CUDACC__
#define ESPER_BOTH __host__ __device__ inline
#else
#define ESPER_BOTH inline
#endif

namespace esper {

struct Moments {
  double weight; // how many, or the sum of their weights
  double mean;
  double spread; // sum of weight * (number - mean)^2
};

ESPER_BOTH Moments no_moments() {
  return Moments{0.0, 0.0, 0.0};
}

ESPER_BOTH Moments merge(const Moments& a, const Moments& b) {
  const double weight = a.weight + b.weight;
  if (!(weight > 0.0)) {
    return a;
  }
  const double share = b.weight / weight;
  const double delta = b.mean - a.mean;
  return Moments{
      weight,
      a.mean + delta * share,
      a.spread + b.spread + delta * delta * (a.weight * share)};
}

// Adds numbers of equal weight.
struct Sum {
  double count = 0.0;
  double first = 0.0;
  double sum = 0.0; // of deviations from the first
  double squares = 0.0; // of the same

  ESPER_BOTH void add(double x) {
    if (count == 0.0) {
      first = x;
    }
    const double deviation = x - first;
    count += 1.0;
    sum += deviation;
    squares += deviation * deviation;
  }

  ESPER_BOTH Moments moments() const {
    if (count == 0.0) {
      return no_moments();
    }
    const double offset = sum / count;
    const double spread = squares - sum * offset;
    return Moments{count, first + offset, spread > 0.0 ? spread : 0.0};
  }
};

// Adds numbers with weights above 0.
struct WeightedSum {
  Moments so_far = {0.0, 0.0, 0.0};

  ESPER_BOTH void add(double x, double weight) {
    const double delta = x - so_far.mean;
    so_far.weight += weight;
    so_far.mean += delta * (weight / so_far.weight);
    so_far.spread += weight * delta * (x - so_far.mean);
  }

  ESPER_BOTH Moments moments() const {
    return so_far;
  }
};

// What a normaliser remembers of one feature.
struct Remembered {
  double mean;
  double variance; // population variance
  double weight;
};

// Between a and b; exact at both ends, and precise near each.
ESPER_BOTH double blend(double a, double b, double keep, double share) {
  return share < 0.5 ? a + share * (b - a) : b + keep * (a - b);
}

// Takes a batch in. The variance is moved and not rebuilt from a sum of squares, so it
// keeps its precision however large the weight grows.
//
// momentum < 0: the batch counts by its weight, as if all had come at once. Else it
// counts 1 - momentum, once the weight so far has reached warm_up.
ESPER_BOTH Remembered
take_in(const Remembered& old, const Moments& batch, double momentum, double warm_up) {
  if (!(batch.weight > 0.0)) {
    return old;
  }
  const double weight = old.weight + batch.weight;
  const bool averages = momentum >= 0.0 && old.weight >= warm_up;
  const double keep = averages ? momentum : old.weight / weight;
  const double share = averages ? 1.0 - momentum : batch.weight / weight;
  const double delta = batch.mean - old.mean;
  const double variance = batch.spread / batch.weight;
  return Remembered{
      blend(old.mean, batch.mean, keep, share),
      blend(old.variance, variance, keep, share) + keep * share * delta * delta,
      weight};
}

} // namespace esper

#endif
