// What the auditor is told of order and memory: events, waits, synchronisation, allocations, frees,
// marks.
#pragma once

namespace esper::auditing
{

void watch_order();
void stop_watching_order();

} // namespace esper::auditing
