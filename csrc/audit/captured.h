/* captured.h: what a capture collects for the replays of its graph. */
#ifndef ESPER_AUDIT_CAPTURED_H
#define ESPER_AUDIT_CAPTURED_H

#include "state.h"

/* The graph whose capture allocated the block. NULL: none did, or it is gone. */
graph *graph_of(const audit *a, const block *b);
/* Every replay will touch that block, which the capture did not allocate. */
void graph_capture_access(audit *a, capture *c, const block *b, const audit_access *access);
/* The capture allocated the block, so every replay may write it. */
void graph_own(audit *a, capture *c, const block *b);

#endif
