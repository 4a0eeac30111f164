// PyTorch's allocator options (PYTORCH_ALLOC_CONF and its relatives).
#pragma once

#include "../esper_alloc.h"

namespace esper
{

// Makes PyTorch parse its environment while its own allocator is current, because the parser
// compares `backend:` with the name of the current allocator.
void parse_environment();

// Gives the options that PyTorch parsed to the core.
void apply_options(esper_core *core);

// Applies per_process_memory_fraction to every device.
void apply_memory_fraction(esper_core *core);

// From now on, settings that change at run time reach the core, too.
void follow_settings();

} // namespace esper
