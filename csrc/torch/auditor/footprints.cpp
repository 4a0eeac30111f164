#include "footprints.h"

#include <c10/util/hash.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

namespace esper
{

namespace
{

// Sizes and strides as they are stored. Asking a subclass may run Python. False: they are symbolic,
// or mean something else.
bool is_plain(const c10::TensorImpl &tensor)
{
  return !tensor.key_set().has(c10::DispatchKey::NestedTensorCUDA) &&
         tensor.sym_sizes_default().size() == tensor.sym_strides_default().size() &&
         c10::asIntArrayRefSlowOpt(tensor.sym_sizes_default()).has_value() &&
         c10::asIntArrayRefSlowOpt(tensor.sym_strides_default()).has_value();
}

// Rows that repeat: the innermost dimensions are dense, and every other stride is a multiple of the
// smallest of them. Otherwise, as with windows that overlap, all from the first to the last byte.
void find_rows(c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t item,
               audit_footprint &bytes)
{
  int64_t dense = 1; // elements
  c10::SmallVector<bool, 8> is_inner(sizes.size(), false);
  for (bool more = true; more;) {
    more = false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 1 && strides[i] == dense) {
        dense *= sizes[i];
        is_inner[i] = true;
        more = true;
        break;
      }
    }
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && !is_inner[i] && strides[i] > 0 && strides[i] < dense) {
      return;
    }
  }
  int64_t period = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] >= dense && (period == 0 || strides[i] < period)) {
      period = strides[i];
    }
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && period > 0 && strides[i] >= dense && strides[i] % period != 0) {
      period = 0;
    }
  }
  if (period > dense) {
    bytes.period = static_cast<size_t>(period) * item;
    bytes.run = static_cast<size_t>(dense) * item;
  }
}

} // namespace

size_t storage_size(const c10::StorageImpl &storage)
{
  const auto bytes = storage.sym_nbytes().maybe_as_int();
  return bytes && *bytes > 0 ? static_cast<size_t>(*bytes) : 0;
}

bool footprint_of(const c10::TensorImpl &tensor, uintptr_t address, size_t size,
                  audit_footprint &bytes)
{
  bytes = {address, size, 0, 0};
  if (!is_plain(tensor)) {
    return size > 0;
  }
  const auto sizes = tensor.sizes_default();
  const auto strides = tensor.strides_default();
  int64_t last = 0; // element
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    elements *= sizes[i];
    last += (sizes[i] - 1) * strides[i];
  }
  if (elements == 0) {
    return false;
  }
  const size_t item = tensor.dtype().itemsize();
  bytes.begin = address + static_cast<size_t>(tensor.storage_offset_default()) * item;
  bytes.size = static_cast<size_t>(last + 1) * item;
  if (last + 1 > elements) {
    find_rows(sizes, strides, item, bytes);
  }
  return true;
}

TensorShape shape_of(const c10::TensorImpl &tensor)
{
  TensorShape shape{c10::typeMetaToScalarType(tensor.dtype()), {}, is_plain(tensor)};
  if (shape.is_known) {
    const auto sizes = tensor.sizes_default();
    shape.sizes.append(sizes.begin(), sizes.end());
  }
  return shape;
}

size_t TensorShape::hash() const
{
  size_t hash = c10::hash_combine(static_cast<size_t>(dtype) + 1, is_known ? sizes.size() + 1 : 0);
  for (const int64_t size : sizes) {
    hash = c10::hash_combine(hash, static_cast<size_t>(size));
  }
  return hash;
}

uint32_t ShapeNumbers::number_of(const TensorShape &shape)
{
  const size_t hash = shape.hash();
  const auto found = numbers_.find(hash);
  if (C10_LIKELY(found != numbers_.end())) {
    return found->second;
  }
  if (entries_.empty()) {
    entries_.resize(most);
  }
  last_ = last_ == UINT32_MAX ? 1 : last_ + 1;
  Entry &entry = entries_[last_ % most];
  if (entry.number != 0) {
    numbers_.erase(entry.hash);
  }
  entry = {hash, last_, shape.text()};
  numbers_.emplace(hash, last_);
  return last_;
}

std::string ShapeNumbers::text(uint32_t number) const
{
  const bool is_known =
      number != 0 && !entries_.empty() && entries_[number % most].number == number;
  return is_known ? entries_[number % most].text : std::string();
}

std::string TensorShape::text() const
{
  std::string text = torch::getTHPDtype(dtype)->name;
  if (is_known) {
    text += " [";
    for (size_t i = 0; i < sizes.size(); ++i) {
      text += (i ? ", " : "") + std::to_string(sizes[i]);
    }
    text += "]";
  }
  return text;
}

} // namespace esper
