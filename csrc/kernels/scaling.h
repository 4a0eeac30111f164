/* scaling.h: computes the line that normalises a feature from what is remembered of it. For host
 * and device. */
#ifndef ESPER_KERNELS_SCALING_H
#define ESPER_KERNELS_SCALING_H

#include <math.h>

#include "moments.h"
#include "normalize.h"

namespace esper
{

// Normalising is (x - center) * factor; the inverse is x * factor + center.
struct Line {
  double center;
  double factor;
};

// A rounded moment that does not match the exact one was written by the user, and counts.
ESPER_BOTH double believed(double exact, float rounded)
{
  return static_cast<float>(exact) == rounded || exact != exact ? exact
                                                                : static_cast<double>(rounded);
}

ESPER_BOTH Line line_of(const Remembered &known, const esper_normalizer_rule &rule)
{
  double deviation = sqrt(known.variance + rule.epsilon);
  if (rule.scaling == ESPER_SAMPLE) {
    const double above = known.weight - 1.0;
    deviation = above > 0.0 ? sqrt(known.variance * (known.weight / above)) : 0.0;
    deviation = deviation > rule.epsilon ? deviation : rule.epsilon;
  }
  if (rule.scaling != ESPER_CENTERED && known.weight < rule.warm_up) {
    deviation = 1.0;
  }
  return Line{rule.scaling == ESPER_CENTERED ? known.mean : 0.0,
              rule.inverse ? deviation : 1.0 / deviation};
}

// A line for arithmetic in T. The center is in two parts, so that single precision loses nothing of
// it.
template <typename T>
struct Scaler {
  T high, low, factor, clip;
  bool inverse;

  ESPER_BOTH Scaler()
  {
  }

  ESPER_BOTH Scaler(const Line &line, const esper_normalizer_rule &rule)
      : high(static_cast<T>(line.center)),
        low(static_cast<T>(line.center - static_cast<double>(high))),
        factor(static_cast<T>(line.factor)), clip(static_cast<T>(rule.clip)),
        inverse(rule.inverse != 0)
  {
  }

  // NaN stays NaN, because comparisons with it are false.
  ESPER_BOTH T normalized(T x) const
  {
    const T z = ((x - high) - low) * factor;
    const T above = z < -clip ? -clip : z;
    return above > clip ? clip : above;
  }

  ESPER_BOTH T restored(T x) const
  {
    return x * factor + low + high;
  }

  ESPER_BOTH T operator()(T x) const
  {
    return inverse ? restored(x) : normalized(x);
  }
};

} // namespace esper

#endif
