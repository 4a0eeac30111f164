// PyTorch's allocator options (PYTORCH_ALLOC_CONF and its relatives).
#pragma once

#include "../../esper_alloc.h"

namespace esper
{

// Makes PyTorch parse its environment, the first time; from then on, settings that change at run
// time reach the core, too. To be called while another allocator is current, because the parser
// compares `backend:` with the name of the current one.
void begin_options();

// Gives the options that PyTorch parsed to the core.
void apply_options(esper_core *core);

// Applies per_process_memory_fraction to every device.
void apply_memory_fraction(esper_core *core);

} // namespace esper
