// What the auditor is told of order and memory: events, waits, synchronisation, allocations, frees,
// marks.
#pragma once

namespace esper
{

namespace auditing
{

void watch_order();
void stop_watching_order();

} // namespace auditing

} // namespace esper
