// What esper_alloc cannot do. Each method raises, naming itself and the feature that calls it.
#include "allocator.h"
#include "unsupported.h"

namespace esper
{

void throw_unsupported(const char *method, const char *asked_by)
{
  TORCH_CHECK_NOT_IMPLEMENTED(false, "esper_alloc does not support ", method, " yet, which ",
                              asked_by,
                              " need; run this program on PyTorch's native allocator for now.");
}

c10::DataPtr Allocator::allocateWithAddress(size_t /*size*/, void * /*address*/)
{
  throw_unsupported("allocateWithAddress", "placed allocations");
}

} // namespace esper
