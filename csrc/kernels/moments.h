/* moments.h: weight, mean and spread of a set of numbers in double precision, and how sets are
 * merged. For host and device.
 *
 * Sums are of deviations from a number K close to the mean, so that no two large sums of squares
 * are subtracted, and nothing is divided before the end. (Shifted data: T. F. Chan, G. H. Golub, R.
 * J. LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983.)
 *
 * - Numbers of equal weight: K is one of them. The sum of squares about K is at most n + 1 times
 *   that about the mean, so the last subtraction loses at most log2(n + 1) of 53 bits.
 * - Weighted numbers are added one at a time, with their mean so far as K (D. H. D. West, "Updating
 *   mean and variance estimates: an improved method", Communications of the ACM 22, 1979).
 * - Merged sets: K is that of the heavier set. If that is its mean, each merge on the way to the
 *   whole set loses at most one bit. */
#ifndef ESPER_KERNELS_MOMENTS_H
#define ESPER_KERNELS_MOMENTS_H

#include <stdint.h>

#ifdef __CUDACC__
#define ESPER_BOTH __host__ __device__ inline
#else
#define ESPER_BOTH inline
#endif

namespace esper
{

// Larger values do not count, as infinities do not: the square of their deviation would be infinite
// and later leave a variance of NaN. 1e140 squared leaves room for a sum of 1e28 of them.
constexpr double kLargest = 1e140;

// Whether a value contributes to the statistics. A float does if it is finite.
ESPER_BOTH bool contributes(double x)
{
  return x >= -kLargest && x <= kLargest;
}

ESPER_BOTH bool contributes(float x)
{
  return x - x == 0.0F;
}

struct Moments {
  double weight;  // how many numbers, or the sum of their weights
  double about;   // K
  double sum;     // sum of weight * (number - K)
  double squares; // sum of weight * (number - K)^2
};

ESPER_BOTH Moments no_moments()
{
  return Moments{0.0, 0.0, 0.0, 0.0};
}

ESPER_BOTH Moments merge(const Moments &a, const Moments &b)
{
  const bool a_is_heavier = a.weight >= b.weight;
  const Moments &heavy = a_is_heavier ? a : b;
  const Moments &light = a_is_heavier ? b : a;
  const double shift = light.about - heavy.about;
  const double sum = light.sum + light.weight * shift; // about the heavier one's K
  return Moments{heavy.weight + light.weight, heavy.about, heavy.sum + sum,
                 heavy.squares + (light.squares + shift * (light.sum + sum))};
}

// The same set about its mean: `about` is the mean and `squares` the spread.
ESPER_BOTH Moments centered(const Moments &given)
{
  if (!(given.weight > 0.0)) {
    return given;
  }
  const double offset = given.sum / given.weight;
  const double spread = given.squares - given.sum * offset;
  return Moments{given.weight, given.about + offset, 0.0, spread > 0.0 ? spread : 0.0};
}

// Adds numbers of equal weight.
struct Sum {
  int count = 0; // the numbers of one thread
  double first = 0.0;
  double sum = 0.0;     // of deviations from the first
  double squares = 0.0; // of their squares

  // Without a branch, for kernels: a number that does not count has deviation 0.
  ESPER_BOTH void add(double x, bool counts)
  {
    const double value = counts ? x : first;
    first = count == 0 ? value : first;
    const double deviation = value - first;
    count += counts;
    sum += deviation;
    squares += deviation * deviation;
  }

  ESPER_BOTH Moments moments() const
  {
    return Moments{static_cast<double>(count), first, sum, squares};
  }
};

// Adds numbers with weights above 0.
struct WeightedSum {
  double weight = 0.0;
  double mean = 0.0;
  double spread = 0.0;

  ESPER_BOTH void add(double x, double its_weight)
  {
    const double delta = x - mean;
    const double share = its_weight / (weight + its_weight);
    mean += delta * share;
    spread += delta * delta * (weight * share);
    weight += its_weight;
  }

  ESPER_BOTH Moments moments() const
  {
    return Moments{weight, mean, 0.0, spread};
  }
};

// What a normaliser remembers of one feature.
struct Remembered {
  double mean;
  double variance; // population variance
  double weight;
};

// A value between a and b. It is exact at both ends and precise near each.
ESPER_BOTH double blend(double a, double b, double keep, double share)
{
  return share < 0.5 ? a + share * (b - a) : b + keep * (a - b);
}

// Merges a batch into the state. The variance is moved and not rebuilt from a sum of squares, so it
// stays precise however large the weight grows.
//
// momentum < 0: the batch counts by its weight, as if all values had come at once. Otherwise it
// counts 1 - momentum once the earlier weight has reached warm_up.
ESPER_BOTH Remembered take_in(const Remembered &old, const Moments &batch, double momentum,
                              double warm_up)
{
  if (!(batch.weight > 0.0)) {
    return old;
  }
  const double weight = old.weight + batch.weight;
  const bool averages = momentum >= 0.0 && old.weight >= warm_up;
  const double keep = averages ? momentum : old.weight / weight;
  const double share = averages ? 1.0 - momentum : batch.weight / weight;
  const Moments known = centered(batch);
  const double delta = known.about - old.mean;
  const double variance = known.squares / known.weight;
  return Remembered{blend(old.mean, known.about, keep, share),
                    blend(old.variance, variance, keep, share) + keep * share * delta * delta,
                    weight};
}

} // namespace esper

#endif
