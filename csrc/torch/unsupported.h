// Exceptions that name a missing feature.
#pragma once

namespace esper
{

[[noreturn]] void throw_unsupported(const char *method, const char *asked_by);

} // namespace esper
