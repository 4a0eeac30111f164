// PyTorch's allocator options (PYTORCH_ALLOC_CONF and its relatives).
#pragma once

#include "../esper_alloc.h"

namespace esper
{

// Has PyTorch parse its environment while its own allocator is current: a
// parse checks `backend:` against the name of the current allocator.
void parse_environment();

// Gives the core what PyTorch parsed.
void apply_options(esper_core *core);

// Applies per_process_memory_fraction to every device.
void apply_memory_fraction(esper_core *core);

// From now on, settings changed at run time reach the core too.
void follow_settings();

} // namespace esper
