// The deleter of memory that the core allocated.
#pragma once

namespace esper
{

// Frees memory of the core. It is the deleter of every DataPtr that allocate() returns while
// caching is on, and what raw_deleter() returns. Its context is the data pointer itself. Never
// throws.
void delete_memory(void *ptr);

} // namespace esper
