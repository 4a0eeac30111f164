/* What a black box keeps, writes and reads. */
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#include "black_box/chunks.h"
#include "black_box/dump.h"
#include "black_box/lock.h"
#include "black_box/read.h"
#include "black_box/sites.h"
#include "exchange.h"

static unsigned current_site;

static unsigned here(void)
{
  return __atomic_load_n(&current_site, __ATOMIC_RELAXED);
}

static void begin_with(size_t bytes)
{
  world_begin(&w);
  name_streams();
  box_reset();
  box_find_sites(here);
  box_begin(w.core, bytes);
}

/* ---- files ----------------------------------------------------------------- */

typedef struct image {
  uint64_t *data;
  size_t bytes;
  box_file_t file;
} image_t;

static size_t written(uint64_t **data, bool urgent)
{
  FILE *temporary = tmpfile();
  CHECK(temporary);
  CHECK_EQ(box_write(fileno(temporary), "a test", "{\"a\": 1}", urgent), 0);
  size_t bytes = (size_t)lseek(fileno(temporary), 0, SEEK_END);
  *data = malloc(bytes);
  CHECK_EQ(pread(fileno(temporary), *data, bytes, 0), bytes);
  fclose(temporary);
  return bytes;
}

static image_t image_of(bool urgent)
{
  image_t image;
  image.bytes = written(&image.data, urgent);
  const char *wrong = box_read(image.data, image.bytes, &image.file);
  if (wrong)
    check_failed(__FILE__, __LINE__, "%s", wrong);
  return image;
}

static void drop_image(image_t *image)
{
  box_forget(&image->file);
  free(image->data);
}

static size_t count_of(const image_t *image, unsigned kind)
{
  size_t count = 0;
  for (size_t i = 0; i < image->file.events.count; i++)
    count += image->file.events.kind[i] == kind;
  return count;
}

/* The index of the n-th event of a kind. */
static size_t nth(const image_t *image, unsigned kind, size_t n)
{
  for (size_t i = 0; i < image->file.events.count; i++)
    if (image->file.events.kind[i] == kind && n-- == 0)
      return i;
  check_failed(__FILE__, __LINE__, "too few events of kind %u", kind);
}

/* The index of the allocation at an address that is live at the end; -1: none. */
static long live_at(const image_t *image, const void *ptr)
{
  const box_events_t *e = &image->file.events;
  for (size_t i = e->count; i-- > 0;)
    if (e->kind[i] == BOX_ALLOC && e->address[i] == (uintptr_t)ptr)
      return e->partner[i] < 0 ? (long)i : -1;
  return -1;
}

static size_t live_count(const image_t *image)
{
  const box_events_t *e = &image->file.events;
  size_t count = 0;
  for (size_t i = 0; i < e->count; i++)
    count += e->kind[i] == BOX_ALLOC && e->partner[i] < 0;
  return count;
}

TEST(a_file_has_where_the_host_was_held_back)
{
  begin_with(MIB);
  world_set_allowance(&w, 20 * MIB);
  for (int i = 0; i < 8; i++) {
    void *p = world_malloc(&w, 12 * MIB, r);
    world_read_on(&w, s, p, r);
    world_use(&w, p, s, 0);
    world_free(&w, p);
  }
  uint64_t held_back = world_counters(&w, 0).held_back;
  image_t image = image_of(false);
  const box_events_t *e = &image.file.events;
  CHECK(held_back > 0);
  CHECK_EQ(count_of(&image, BOX_HELD_BACK), held_back);
  CHECK_EQ(e->size[nth(&image, BOX_HELD_BACK, 0)], 12 * MIB);
  size_t pending = nth(&image, BOX_PENDING, 0), over = nth(&image, BOX_AVAILABLE, 0);
  CHECK_EQ(e->partner[pending], nth(&image, BOX_ALLOC, 0));
  CHECK_EQ(e->partner[over], nth(&image, BOX_ALLOC, 0));
  CHECK_EQ(e->size[pending], 12 * MIB);
  CHECK(nth(&image, BOX_FREE, 0) < pending && pending < over);
  drop_image(&image);
  finish();
}

TEST(sizes_of_any_magnitude_are_kept)
{
  const uint64_t unit = (uint64_t)1 << SIZE_BITS;
  uint64_t sizes[] = {1, 511, unit - 1, unit, unit + 1, 200 * unit};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    uint64_t second = box_second(sizes[i], MOST_LANES - 1, MOST_SITES - 1);
    uint64_t kept = sizes[i] < unit ? sizes[i] : (sizes[i] + 511) / 512 * 512;
    CHECK_EQ(box_size(second), kept);
    CHECK_EQ(box_lane(second), MOST_LANES - 1);
    CHECK_EQ(box_site(second), MOST_SITES - 1);
  }
  uint64_t address = (UINT64_C(1) << 49) - 512;
  uint64_t first = box_first(BOX_FREE, (1u << TICK_BITS) - 1, address);
  CHECK_EQ(box_address(first), address);
  CHECK_EQ(box_ticks(first), (1u << TICK_BITS) - 1);
  CHECK_EQ(box_kind(first), BOX_FREE);
}

/* A pause that an event's ticks cannot express. */
TEST(time_goes_on_after_a_pause)
{
  begin_with(MIB);
  void *p = world_malloc(&w, 512, r);
  usleep(150000);
  world_free(&w, p);
  image_t image = image_of(false);
  const box_events_t *e = &image.file.events;
  int64_t between = e->ns[nth(&image, BOX_FREE, 0)] - e->ns[nth(&image, BOX_ALLOC, 0)];
  CHECK(between >= 140000000);
  drop_image(&image);
  finish();
}

/* ---- the end of the memory ------------------------------------------------------ */

TEST(live_memory_is_known_however_old_it_is)
{
  void *old[KEPT], *young[KEPT] = {0};
  uint64_t state = 1;
  begin_with(3 * 64 * KIB);
  current_site = site_add(1, "old", 3);
  CHECK_EQ(site_add(2, "old", 3), current_site);
  CHECK_EQ(site_find(2), current_site);
  for (int i = 0; i < KEPT; i++)
    old[i] = world_malloc(&w, 512 * (1 + draw_below(&state, 9)), r);
  current_site = 0;
  for (int i = 0; i < 60000; i++) {
    int at = (int)draw_below(&state, KEPT);
    if (young[at])
      world_free(&w, young[at]);
    young[at] = world_malloc(&w, 512 * (1 + draw_below(&state, 9)), r);
  }
  CHECK(box_stats().chunks_used_again > 5);
  CHECK(box_stats().bytes < MIB);
  image_t image = image_of(false);
  CHECK(image.file.events.count < 40000);
  CHECK_EQ(count_of(&image, BOX_NONE), 0);
  size_t live = KEPT;
  for (int i = 0; i < KEPT; i++) {
    long at = live_at(&image, old[i]);
    CHECK(at >= 0 && image.file.events.site[at] == site_find(1));
    if (young[i]) {
      live++;
      CHECK(live_at(&image, young[i]) >= 0);
    }
  }
  CHECK_EQ(live_count(&image), live);
  int64_t bytes = 0;
  for (size_t i = 0; i < image.file.lane_count; i++)
    bytes += image.file.lanes[i].before;
  CHECK(bytes > 0 && bytes <= reserved());
  drop_image(&image);
  finish();
}

TEST(the_last_chunk_is_used_again)
{
  begin_with(64 * KIB);
  for (int i = 0; i < 2 * CHUNK_WORDS; i++)
    world_free(&w, world_malloc(&w, 512, r));
  CHECK(box_stats().chunks_used_again > 3);
  CHECK_EQ(box_stats().events_lost, 0);
  finish();
}

/* ---- threads ---------------------------------------------------------------------- */

TEST(threads_free_each_others_memory)
{
  pthread_t threads[THREADS];
  begin_without_oracle(8 * 64 * KIB);
  start_exchange(threads);
  for (int i = 0; i < 3; i++) { /* while they run, or afterwards */
    image_t image = image_of(false);
    drop_image(&image);
  }
  join_exchange(threads);
  CHECK(box_stats().chunks_used_again > 0);
  image_t image = image_of(false);
  size_t live = 0;
  for (int i = 0; i < KEPT; i++)
    if (shared[i]) {
      live++;
      CHECK(live_at(&image, shared[i]) >= 0);
      CHECK_OK(esper_free(w.core, shared[i]));
    }
  CHECK_EQ(live_count(&image), live);
  drop_image(&image);
  finish();
}

static void write_urgently(void *error)
{
  FILE *temporary = tmpfile();
  *(int *)error = box_write(fileno(temporary), "a test", NULL, true);
  fclose(temporary);
}

/* A handler may have interrupted the thread that has the lock. */
TEST(a_signal_waits_for_nothing)
{
  int error;
  begin_with(MIB);
  void *p = world_malloc(&w, 512, r);
  image_t image = image_of(true);
  CHECK_EQ(count_of(&image, BOX_ALLOC), 1);
  CHECK_EQ(image.file.segment_count, 0);
  drop_image(&image);
  box_lock();
  check_on_another_thread(write_urgently, &error);
  box_unlock();
  CHECK_EQ(error, EAGAIN);
  world_free(&w, p);
  finish();
}

static char path[64];

static void dump_again_and_again(void *failed)
{
  for (int i = 0; i < 30; i++)
    *(int *)failed += dump_to(path, "a test", NULL, false) != 0;
}

/* One of several writers is the last, and its file is whole. */
TEST(writers_of_one_path_leave_a_whole_file)
{
  begin_with(MIB);
  void *p = world_malloc(&w, 512, r);
  snprintf(path, sizeof path, "/tmp/test_black_box.%d", (int)getpid());
  int failed = 0;
  pid_t child = fork();
  if (child == 0) {
    CHECK(!box_is_on()); /* the memory is the parent's */
    dump_again_and_again(&failed);
    _exit(failed);
  }
  dump_again_and_again(&failed);
  int status;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(failed, 0);
  uint64_t header[17];
  FILE *file = fopen(path, "r");
  CHECK(file && fread(header, 8, 17, file) == 17 && header[0] == BOX_MAGIC);
  fclose(file);
  unlink(path);
  CHECK_EQ(dump_to("/dev/null", "a test", NULL, false), EEXIST);
  world_free(&w, p);
  finish();
}

/* ---- files from anywhere ---------------------------------------------------------------- */

static bool is_read(const uint64_t *data, size_t bytes)
{
  box_file_t file;
  const char *wrong = box_read(data, bytes, &file);
  if (!wrong)
    box_forget(&file);
  return !wrong;
}

static uint64_t *some_file(size_t *bytes)
{
  begin_with(MIB);
  current_site = site_add(5, "place", 5);
  void *p = world_malloc(&w, 1000, r), *q = world_malloc(&w, 3 * MIB, s);
  world_free(&w, p);
  uint64_t *data;
  *bytes = written(&data, false);
  world_free(&w, q);
  current_site = 0;
  finish();
  return data;
}

TEST(a_file_that_is_cut_is_refused)
{
  size_t bytes;
  uint64_t *data = some_file(&bytes);
  CHECK(is_read(data, bytes));
  for (size_t end = 0; end < bytes; end++) {
    uint64_t *part = malloc(end + 1); /* so that a sanitizer sees where it ends */
    memcpy(part, data, end);
    CHECK(!is_read(part, end));
    free(part);
  }
  free(data);
}

TEST(a_damaged_file_does_no_harm)
{
  size_t bytes;
  uint64_t *data = some_file(&bytes), state = 3, *damaged = malloc(bytes);
  int refused = 0;
  for (int i = 0; i < 20000; i++) {
    memcpy(damaged, data, bytes);
    for (uint64_t n = 1 + draw_below(&state, 3); n; n--)
      ((char *)damaged)[draw_below(&state, bytes)] = (char)draw64(&state);
    refused += !is_read(damaged, bytes);
  }
  CHECK(refused > 1000);
  free(damaged);
  free(data);
}
