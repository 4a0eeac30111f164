/* The page table of a mapped segment: a segment made up here, whose pages no driver has. */
#include "core/memory/page_table.h"

#include "core/base/core.h"
#include "check.h"

enum { GRANULES = 64, PIECES = 8 };

static const size_t G = 2 * MIB; /* a granule */
static device_t device;
static segment_t segment;
static block_t piece[PIECES];

static void begin(void)
{
  device = (device_t){.granule = G};
  segment = (segment_t){.device = &device, .address = 0x7000000000, .size = GRANULES * G};
  CHECK(pages_create(&segment));
}

static void end(void)
{
  pages_destroy(&segment);
}

static uintptr_t at(size_t granule)
{
  return segment.address + granule * G;
}

static void add(size_t granule, size_t granules, uint64_t handle)
{
  page_add(&segment, at(granule), granules * G, handle);
}

static page_t *on(size_t granule)
{
  return page_at(&segment, at(granule));
}

/* ---- the table ----------------------------------------------------------------- */

SCENE(every_address_of_a_page_leads_to_it)
{
  add(4, 3, 77);
  const page_t *page = on(4);
  CHECK_EQ(page->handle, 77);
  CHECK_EQ(page_address(&segment, page), at(4));
  CHECK_EQ(page_size(&segment, page), 3 * G);
  CHECK(!page->stale && !page->shared);
  CHECK(on(5) == page && on(6) == page);
  CHECK(page_at(&segment, at(4) + 1) == page && page_at(&segment, at(7) - 1) == page);
  CHECK(!page_at(&segment, at(4) - 1) && !on(7));
}

TEST(without_host_memory_there_is_no_table)
{
  device = (device_t){.granule = G};
  segment_t none = {.device = &device, .size = GRANULES * G};
  CHECK(!WITH_MALLOCS(0, pages_create(&none)) && !none.pages);
}

/* ---- pages in a block ------------------------------------------------------------ */

/* The pages of a block that ends with the eighth, as bytes from the segment's beginning. */
static size_t within(size_t begin_at, size_t enough, size_t most, size_t *from)
{
  block_t block = {.segment = &segment,
                   .address = segment.address + begin_at,
                   .size = 8 * G - begin_at};
  uintptr_t first = 0;
  size_t size = pages_within(&block, enough, most, &first);
  *from = size ? first - segment.address : SIZE_MAX;
  return size;
}

SCENE(no_more_pages_are_taken_than_enough)
{
  size_t from;
  for (size_t i = 0; i < 4; i++)
    add(2 * i, 2, i);
  CHECK_EQ(within(0, 0, SIZE_MAX, &from), 0);
  CHECK_EQ(within(0, 1, SIZE_MAX, &from), 2 * G);
  CHECK_EQ(within(0, 2 * G, SIZE_MAX, &from), 2 * G);
  CHECK_EQ(within(0, 2 * G + 1, SIZE_MAX, &from), 4 * G);
  CHECK_EQ(within(0, SIZE_MAX, 5 * G, &from), 4 * G); /* a third is too much */
  CHECK_EQ(within(0, SIZE_MAX, 2 * G - 1, &from), 0);
  CHECK_EQ(within(512, SIZE_MAX, 2 * G, &from), 2 * G);
  CHECK_EQ(from, 2 * G);
}

/* ---- checking ---------------------------------------------------------------------- */

/* Blocks and holes tile the segment: a block of 2 pages, of which the second is shared with the
 * next block; a hole; a stale block; a piece that is being filled; and the hole at the end. */
static void begin_tiled(void)
{
  static const struct {
    size_t end;
    block_state state;
  } TILES[] = {{3 * MIB, BLOCK_LIVE},     {4 * MIB, BLOCK_READY},    {8 * MIB, BLOCK_HOLE},
               {12 * MIB, BLOCK_STALE},   {16 * MIB, BLOCK_FILLING}, {20 * MIB, BLOCK_PENDING},
               {GRANULES * G, BLOCK_HOLE}};
  begin();
  size_t from = 0;
  for (int i = 0; i < 7; i++) {
    piece[i] = (block_t){.segment = &segment,
                         .address = segment.address + from,
                         .size = TILES[i].end - from,
                         .state = (uint8_t)TILES[i].state,
                         .prev = i ? &piece[i - 1] : NULL,
                         .next = i < 6 ? &piece[i + 1] : NULL};
    from = TILES[i].end;
  }
  segment.first = piece;
  segment.touched = 10;
  segment.bytes = 8 * MIB;
  add(0, 1, 1);
  add(1, 1, 2);
  add(4, 2, 3);
  on(4)->stale = true;
  add(8, 2, 4);
  CHECK(pages_are_valid(&segment));
}

/* What the statement does to a segment that is tiled is noticed. */
#define CHECK_NOTICED(statement)       \
  do {                                 \
    begin_tiled();                     \
    statement;                         \
    CHECK(!pages_are_valid(&segment)); \
    end();                             \
  } while (0)

TEST(what_is_wrong_with_a_page_is_noticed)
{
  CHECK_NOTICED(page_remove(&segment, on(1)));
  CHECK_NOTICED(segment.touched = 9); /* of its last page */
  CHECK_NOTICED(add(3, 1, 9));        /* in a hole */
  CHECK_NOTICED(segment.pages[9].granules = 1);
  CHECK_NOTICED(segment.pages[9].first = 9);
  CHECK_NOTICED(segment.pages[9].shared = (shared_t *)&device);
  CHECK_NOTICED(on(4)->stale = false);
  CHECK_NOTICED(on(0)->stale = true);
  CHECK_NOTICED(segment.bytes += 512);
}

SCENE_WITH(a_page_may_come_where_another_thread_fills_a_hole, begin_tiled())
{
  add(6, 1, 9);
  CHECK(pages_are_valid(&segment));
}

static void part_the_hole(void)
{
  block_t *hole = &piece[2], *half = &piece[7];
  *half = *hole;
  half->address += MIB;
  half->size -= MIB;
  hole->size = MIB;
  hole->next = half;
}

TEST(a_hole_that_begins_within_a_granule_is_noticed)
{
  CHECK_NOTICED(part_the_hole());
}
