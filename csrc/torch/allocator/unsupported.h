// The exception of methods that esper_alloc does not support.
#pragma once

namespace esper
{

// `asked_by`: what in PyTorch needs the method.
[[noreturn]] void throw_unsupported(const char *method, const char *asked_by);

} // namespace esper
