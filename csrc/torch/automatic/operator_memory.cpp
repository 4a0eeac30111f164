#include "operator_memory.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

namespace esper::detail
{

// A subclass may call itself sparse without being one of these.
SparseParts sparse_parts(const c10::TensorImpl &tensor)
{
  if (const auto *coo = dynamic_cast<const at::SparseTensorImpl *>(&tensor)) {
    return {{coo->indices(), coo->values(), {}}};
  }
  if (const auto *compressed = dynamic_cast<const at::SparseCsrTensorImpl *>(&tensor)) {
    return {{compressed->compressed_indices(), compressed->plain_indices(), compressed->values()}};
  }
  return {};
}

} // namespace esper::detail
