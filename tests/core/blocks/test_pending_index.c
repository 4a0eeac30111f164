/* The events that the pending blocks of a heap wait for. */
#include "core/blocks/pending_index.h"

#include "made_blocks.h"

static pending_index_t *waits;

static void begin_index(void)
{
  BEGIN_MADE(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4);
  waits = &heap->pending_index;
}

/* The number that the index has for a stream; 0: none. */
static uint64_t awaited(esper_stream stream)
{
  for (unsigned i = 0; i < waits->count; i++)
    if (waits->on[i].stream == stream_of(stream))
      return waits->on[i].from;
  return 0;
}

static uint64_t last(esper_stream stream)
{
  return atomic_load(&stream_of(stream)->last);
}

/* ---- which events ------------------------------------------------------------- */

TEST(of_each_stream_the_earliest_event_counts)
{
  begin_index();
  record_t *first = record_on(s), *second = record_on(s), *third = record_on(s);
  owe_until(made[0], s, second, 0);
  owe_until(made[2], s, first, 0);
  owe_until(made[4], s, third, 0);
  owe(made[6], w.stream[2], 0);
  free_blocks_add(made[0]);
  CHECK_EQ(awaited(s), second->number);
  free_blocks_add(made[2]);
  CHECK_EQ(awaited(s), first->number);
  free_blocks_add(made[4]);
  free_blocks_add(made[6]);
  CHECK_EQ(awaited(s), first->number);
  CHECK_EQ(awaited(w.stream[2]), last(w.stream[2]));
  CHECK_EQ(waits->count, 2);
  CHECK(!pending_index_may_be_ready(heap));
  for (int i = 0; i < 8; i += 2)
    CHECK(pending_index_is_valid(made[i]));
  end_made();
}

/* ---- what the index does not know ------------------------------------------------ */

TEST(a_withheld_block_waits_for_the_quiesce_alone)
{
  begin_index();
  owe(made[0], s, 0);
  made[0]->withheld = true;
  free_blocks_add(made[0]);
  CHECK_EQ(waits->count, 0);
  CHECK(!waits->unknown);
  CHECK(pending_index_is_valid(made[0]));
  end_made();
}

TEST(with_more_streams_than_it_has_entries_each_block_is_looked_at)
{
  begin_index();
  esper_stream stream;
  presented_t as;
  for (int i = 0; i <= INDEXED_STREAMS; i++) {
    CHECK(!waits->unknown);
    stream = world_stream(&w, 0);
    CHECK_OK(stream_present(w.core, stream, &as));
    owe(made[i], stream, 0);
    free_blocks_add(made[i]);
  }
  CHECK_EQ(waits->count, INDEXED_STREAMS);
  CHECK(waits->unknown && pending_index_may_be_ready(heap));
  complete(stream); /* the one without an entry */
  CHECK(free_blocks_promote(heap));
  CHECK_EQ(made[INDEXED_STREAMS]->state, BLOCK_READY);
  CHECK(!waits->unknown);
  end_made();
}

TEST(an_index_that_would_miss_a_block_is_noticed)
{
  begin_index();
  owe(made[0], s, 0);
  free_blocks_add(made[0]);
  CHECK(pending_index_is_valid(made[0]));
  waits->on[0].from++;
  CHECK(!pending_index_is_valid(made[0]));
  waits->unknown = true;
  CHECK(pending_index_is_valid(made[0]));
  waits->unknown = false;
  waits->on[0].from--;
  waits->on[0].stream = stream_of(w.stream[2]);
  CHECK(!pending_index_is_valid(made[0]));
  waits->on[0].stream = stream_of(s);
  end_made();
}
