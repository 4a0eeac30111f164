/* graphs.h: captures of CUDA graphs, and their replays. */
#ifndef ESPER_AUDIT_GRAPHS_H
#define ESPER_AUDIT_GRAPHS_H

#include "state.h"

void graphs_destroy(audit *a);

#endif
