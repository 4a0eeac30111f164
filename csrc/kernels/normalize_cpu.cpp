#include "normalize_cpu.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "scaling.h"

namespace esper
{
namespace
{

// Rows are added up in parts with fixed bounds and merged in order, so that the number of threads
// does not matter.
constexpr int64_t kPartRows = 1024;
constexpr int64_t kMostParts = 64;
constexpr int64_t kGrain = 32768; // values that are worth a thread

double weight_of(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                 int64_t row, int64_t column, double x)
{
  const int64_t each = row * state.features + column;
  if (!contributes(x) || (batch.mask != nullptr && batch.mask[batch.mask_each ? each : row] == 0)) {
    return 0.0;
  }
  if (batch.weights == nullptr) {
    return 1.0;
  }
  const double weight = batch.weights[batch.weights_each ? each : row];
  return std::isfinite(weight) && weight > 0.0 ? weight : 0.0;
}

struct Part {
  std::vector<Moments> moments;
  int64_t rows = 0;
};

template <typename T, typename Adder>
Part add_up(const esper_normalizer_state &state, const esper_normalizer_batch &batch, int64_t begin,
            int64_t end)
{
  constexpr bool weighted = std::is_same_v<Adder, WeightedSum>;
  std::vector<Adder> sums(static_cast<size_t>(state.features));
  Part part;
  const T *values = static_cast<const T *>(batch.values);
  for (int64_t row = begin; row < end; row++) {
    bool counts = false;
    for (int64_t column = 0; column < state.features; column++) {
      const double x = static_cast<double>(values[row * state.features + column]);
      if constexpr (weighted) {
        const double weight = weight_of(state, batch, row, column, x);
        if (weight > 0.0) {
          sums[column].add(x, weight);
          counts = true;
        }
      } else {
        sums[column].add(x, contributes(x));
        counts |= contributes(x);
      }
    }
    part.rows += counts;
  }
  part.moments.reserve(sums.size());
  for (const Adder &sum : sums) {
    part.moments.push_back(sum.moments());
  }
  return part;
}

template <typename T>
Part add_up_all(const esper_normalizer_state &state, const esper_normalizer_batch &batch)
{
  const int64_t size = std::max(kPartRows, (batch.rows + kMostParts - 1) / kMostParts);
  const int64_t count = (batch.rows + size - 1) / size;
  std::vector<Part> parts(static_cast<size_t>(count));
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, size * state.features));
  at::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t begin = i * size, end = std::min(begin + size, batch.rows);
      parts[i] = batch.mask != nullptr || batch.weights != nullptr
                     ? add_up<T, WeightedSum>(state, batch, begin, end)
                     : add_up<T, Sum>(state, batch, begin, end);
    }
  });
  Part all = std::move(parts[0]);
  for (int64_t i = 1; i < count; i++) {
    all.rows += parts[i].rows;
    for (size_t column = 0; column < all.moments.size(); column++) {
      all.moments[column] = centered(merge(all.moments[column], parts[i].moments[column]));
    }
  }
  return all;
}

Remembered remembered(const esper_normalizer_state &state, int64_t column)
{
  const int64_t n = state.features;
  return Remembered{believed(state.moments[column], state.mean[column]),
                    believed(state.moments[n + column], state.variance[column]),
                    state.moments[2 * n + column]};
}

void remember(const esper_normalizer_state &state, int64_t column, const Remembered &now)
{
  const int64_t n = state.features;
  state.moments[column] = now.mean;
  state.moments[n + column] = now.variance;
  state.moments[2 * n + column] = now.weight;
  state.mean[column] = static_cast<float>(now.mean);
  state.variance[column] = static_cast<float>(now.variance);
}

template <typename T>
void apply_on_cpu(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                  const esper_normalizer_rule &rule, void *out)
{
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::vector<Scaler<A>> scalers(static_cast<size_t>(state.features));
  for (int64_t column = 0; column < state.features; column++) {
    scalers[column] = Scaler<A>(line_of(remembered(state, column), rule), rule);
  }
  const T *values = static_cast<const T *>(batch.values);
  A *results = static_cast<A *>(out);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, state.features));
  at::parallel_for(0, batch.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      for (int64_t column = 0; column < state.features; column++) {
        const int64_t at = row * state.features + column;
        results[at] = scalers[column](static_cast<A>(values[at]));
      }
    }
  });
}

template <typename Function>
void with_type(esper_value_type type, Function &&function)
{
  switch (type) {
  case ESPER_DOUBLE: return function(double());
  case ESPER_HALF: return function(c10::Half());
  case ESPER_BFLOAT16: return function(c10::BFloat16());
  default: return function(float());
  }
}

} // namespace

void normalizer_update_cpu(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                           const esper_normalizer_rule &rule, void *out)
{
  if (batch.rows == 0 || state.features == 0) {
    return;
  }
  with_type(batch.type, [&](auto of_type) {
    using T = decltype(of_type);
    const Part all = add_up_all<T>(state, batch);
    for (int64_t column = 0; column < state.features; column++) {
      const Remembered old = remembered(state, column);
      remember(state, column, take_in(old, all.moments[column], rule.momentum, rule.warm_up));
    }
    *state.count += all.rows;
    if (out != nullptr) {
      apply_on_cpu<T>(state, batch, rule, out);
    }
  });
}

void normalizer_apply_cpu(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                          const esper_normalizer_rule &rule, void *out)
{
  if (batch.rows == 0 || state.features == 0) {
    return;
  }
  with_type(batch.type,
            [&](auto of_type) { apply_on_cpu<decltype(of_type)>(state, batch, rule, out); });
}

} // namespace esper
