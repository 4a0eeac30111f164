#include "unsupported.h"

#include <c10/util/Exception.h>

namespace esper
{

void throw_unsupported(const char *method, const char *asked_by)
{
  TORCH_CHECK_NOT_IMPLEMENTED(false, "esper_alloc does not support ", method, " yet, which ",
                              asked_by,
                              " need; run this program on PyTorch's native allocator for now.");
}

} // namespace esper
