// Which bytes of its storage a tensor shows, and what the tensor looks like.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "../../audit/audit.h"

namespace esper
{

// Bytes, or 0 if they are unknown.
size_t storage_size(const c10::StorageImpl &storage);

// The tensor's bytes, in a storage that begins at `address` and has `size` bytes. False: it has no
// element. What has an unusual layout counts as the whole storage.
bool footprint_of(const c10::TensorImpl &tensor, uintptr_t address, size_t size,
                  audit_footprint &bytes);

struct TensorShape {
  c10::ScalarType dtype;
  c10::SmallVector<int64_t, 5> sizes;
  bool is_known;

  size_t hash() const;
  std::string text() const; // for example "float32 [128, 64]"
};
TensorShape shape_of(const c10::TensorImpl &tensor);

// Numbers for shapes, and what they stand for. A program whose sizes never repeat has new ones for
// ever, so the oldest are forgotten.
class ShapeNumbers
{
public:
  static constexpr size_t most = 1 << 14;

  uint32_t number_of(const TensorShape &shape); // never 0
  std::string text(uint32_t number) const;      // empty: 0, or forgotten

private:
  struct Entry {
    size_t hash;
    uint32_t number;
    std::string text;
  };
  std::vector<Entry> entries_; // number n is at n modulo `most`
  std::unordered_map<size_t, uint32_t> numbers_;
  uint32_t last_ = 0;
};

} // namespace esper
