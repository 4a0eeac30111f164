/* The ring of a device's last actions. */
#include "core/stats/trace_ring.h"

#include "check.h"

static trace_t trace;

static void keep(size_t from, size_t to)
{
  for (size_t i = from; i < to; i++)
    trace_keep(&trace, &(esper_trace_entry){.action = ESPER_TRACE_ALLOC, .address = i});
}

static void check_entries(size_t count, size_t first)
{
  CHECK_EQ(trace.count, count);
  for (size_t i = first; i < count; i++)
    CHECK_EQ(trace.entries[i % trace.capacity].address, i);
}

TEST(the_ring_grows_up_to_its_limit_and_then_wraps)
{
  CHECK(trace_init(&trace, 5000));
  keep(0, 3000);
  CHECK(trace.capacity <= 5000);
  check_entries(3000, 0);
  keep(3000, 12345);
  CHECK_EQ(trace.capacity, 5000);
  check_entries(12345, 12345 - 5000);
  trace_destroy(&trace);
}

TEST(a_cleared_ring_begins_again)
{
  CHECK(trace_init(&trace, 4));
  keep(0, 9);
  trace_clear(&trace);
  CHECK_EQ(trace.count, 0);
  keep(0, 2);
  check_entries(2, 0);
  trace_destroy(&trace);
  CHECK(!trace.entries);
}
