/* made_blocks.h: a made segment in the heap of r, cut into claimed blocks of the sizes that a test
 * wants. No memory is behind it. */
#ifndef ESPER_MADE_BLOCKS_H
#define ESPER_MADE_BLOCKS_H

#include "core/blocks/block.h"
#include "core/blocks/free_blocks.h"
#include "core/blocks/use.h"
#include "core/order/retire.h"
#include "heap_world.h"

enum { MOST_BLOCKS = 16 };

__attribute__((unused)) static device_t *device;
__attribute__((unused)) static heap_t *heap;
__attribute__((unused)) static segment_t segment;
__attribute__((unused)) static block_t *made[MOST_BLOCKS]; /* by address */

/* `kib`: the sizes, up to a 0. */
static inline void begin_made(const size_t *kib)
{
  presented_t presented;
  begin_on((sim_options){.completion = SIM_WHEN_TOLD}, NULL);
  CHECK_OK(core_device(w.core, 0, &device));
  for (int i = 0; i < WORLD_STREAMS; i++)
    CHECK_OK(stream_present(w.core, w.stream[i], &presented));
  heap = heap_of(r);
  segment = (segment_t){.address = 0x10000000, .heap = heap, .device = device};
  for (int i = 0; kib[i]; i++)
    segment.size += kib[i] * KIB;
  segment.bytes = segment.size;
  segment.first = made[0] = block_create(device, &segment, segment.address, segment.size);
  CHECK(made[0]);
  for (int i = 0; kib[i + 1]; i++)
    CHECK((made[i + 1] = block_split(device, made[i], kib[i] * KIB)));
}

#define BEGIN_MADE(...) begin_made((const size_t[]){__VA_ARGS__, 0})

static inline void end_made(void)
{
  CHECK(heap_is_valid(heap));
  while (segment.first) {
    block_t *b = segment.first;
    if (block_is_in_bin(b))
      free_blocks_claim(b);
    segment.first = b->next;
    block_destroy(device, b);
  }
  CHECK(heap_is_valid(heap));
  end();
}

static inline presented_t presented(esper_stream stream)
{
  return stream_presented(stream_of(stream), stream.handle);
}

/* Records an event on the stream. */
static inline record_t *record_on(esper_stream stream)
{
  record_t *record = stream_record(presented(stream));
  CHECK(record);
  return record;
}

/* The block gets a use that ends with the record, which may be NULL. */
static inline void owe_until(block_t *b, esper_stream stream, record_t *record, unsigned flags)
{
  use_t *use = use_take(device);
  CHECK(use && use_attach(b, stream_of(stream), record, flags, &use) && !use);
}

static inline void owe(block_t *b, esper_stream stream, unsigned flags)
{
  owe_until(b, stream, record_on(stream), flags);
}

/* All that was enqueued on the stream is over, and the core has heard of it. */
static inline void complete(esper_stream stream)
{
  world_run(&w, stream);
  stream_retire(stream_of(stream));
}

#endif
