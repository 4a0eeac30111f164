/* A reader beside the program hears of each event once, and knows what is live. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "black_box/chunks.h"
#include "black_box/follow.h"
#include "black_box/read.h"
#include "black_box/sites.h"
#include "exchange.h"

/* ---- the reader ------------------------------------------------------------- */

typedef struct reader {
  int socket;
  char *data;
  size_t bytes;
  /* What it keeps, and what it was told last. */
  uint64_t since;
  unsigned sites;
  box_live_item_t *live;
  size_t live_count;
  bool whole, late;
  uint64_t events; /* mallocs and frees */
} reader_t;

static void *receive(void *argument)
{
  reader_t *reader = argument;
  size_t capacity = 0;
  reader->bytes = 0;
  reader->data = NULL;
  for (ssize_t got = 1; got > 0; reader->bytes += (size_t)got) {
    if (capacity - reader->bytes < 4096)
      reader->data = realloc(reader->data, capacity = 2 * capacity + 65536);
    got = read(reader->socket, reader->data + reader->bytes, capacity - reader->bytes);
    CHECK(got >= 0);
  }
  return NULL;
}

static void append(reader_t *to, const void *data, size_t bytes)
{
  if (!bytes)
    return;
  to->data = realloc(to->data, to->bytes + bytes);
  memcpy(to->data + to->bytes, data, bytes);
  to->bytes += bytes;
}

static void append_section(reader_t *to, const char *name, size_t count, size_t bytes)
{
  box_section_t section = {.count = (uint32_t)count, .bytes = bytes};
  memcpy(section.name, name, 4);
  append(to, &section, sizeof section);
}

/* Reads what it was told as a file, with what was live before. */
static void take_in(reader_t *reader, reader_t *image)
{
  box_file_t file;
  for (size_t i = 0; i < reader->live_count; i++)
    reader->live[i].ticks = reader->since;
  append_section(image, "LIVE", reader->live_count, reader->live_count * sizeof *reader->live);
  append(image, reader->live, reader->live_count * sizeof *reader->live);
  append_section(image, "END ", 0, 0);
  const char *wrong = box_read(image->data, image->bytes, &file);
  if (wrong)
    check_failed(__FILE__, __LINE__, "%s", wrong);
  const box_events_t *e = &file.events;
  free(reader->live);
  reader->live = malloc((e->count + 1) * sizeof *reader->live);
  reader->live_count = 0;
  for (size_t i = 0; i < e->count; i++)
    if (e->kind[i] == BOX_ALLOC && e->partner[i] < 0)
      reader->live[reader->live_count++] =
          (box_live_item_t){e->address[i], e->size[i], file.header.end_ticks, e->lane[i], 0};
  box_forget(&file);
}

static void count_events(reader_t *reader, const char *body)
{
  box_chunk_head_t head;
  memcpy(&head, body, sizeof head);
  const uint64_t *word = (const uint64_t *)(const void *)(body + sizeof head);
  for (unsigned at = 0; at < head.words; at += (unsigned)box_words(box_kind(word[at])))
    reader->events += box_kind(word[at]) == BOX_ALLOC || box_kind(word[at]) == BOX_FREE;
}

static void ask(reader_t *reader)
{
  int pair[2];
  pthread_t thread;
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  reader->socket = pair[1];
  CHECK_EQ(pthread_create(&thread, NULL, receive, reader), 0);
  CHECK_EQ(box_follow(pair[0], reader->since, reader->sites), 0);
  close(pair[0]);
  pthread_join(thread, NULL);
  close(pair[1]);

  reader_t image = {0};
  box_header_t header;
  box_section_t section;
  memcpy(&header, reader->data, sizeof header);
  reader->whole = strcmp(header.why, "whole") == 0;
  reader->late = false;
  if (reader->whole)
    reader->live_count = 0;
  append(&image, &header, sizeof header);
  for (size_t at = sizeof header; at < reader->bytes;) {
    memcpy(&section, reader->data + at, sizeof section);
    size_t bytes = sizeof section + section.bytes + (-section.bytes & 7);
    reader->late |= memcmp(section.name, "LATE", 4) == 0;
    if (memcmp(section.name, "SITE", 4) == 0)
      reader->sites += section.count;
    else if (memcmp(section.name, "END ", 4))
      append(&image, reader->data + at, bytes);
    if (memcmp(section.name, "EVNT", 4) == 0)
      count_events(reader, reader->data + at + sizeof section);
    at += bytes;
  }
  if (!reader->late)
    take_in(reader, &image);
  reader->since = reader->late ? 0 : header.end_ticks;
  free(image.data);
  free(reader->data);
}

static bool knows(const reader_t *reader, const void *ptr)
{
  for (size_t i = 0; i < reader->live_count; i++)
    if (reader->live[i].address == (uintptr_t)ptr)
      return true;
  return false;
}

/* ---- what it hears ------------------------------------------------------------- */

TEST(each_event_is_told_once)
{
  void *live[KEPT] = {0};
  uint64_t state = 1, made = 0;
  reader_t reader = {.sites = 1};
  begin_without_oracle(4 * MIB);
  for (int round = 0; round < 6; round++) {
    for (int i = 0; i < 1000 * round; i++) {
      int at = (int)draw_below(&state, KEPT);
      if (live[at])
        world_free(&w, live[at]);
      made += live[at] ? 2 : 1;
      live[at] = world_malloc(&w, 512 * (1 + draw_below(&state, 9)), r);
    }
    if (round == 3)
      usleep(150000); /* ticks begin anew */
    ask(&reader);
    CHECK_EQ(reader.whole, round == 0);
    CHECK_EQ(reader.events, made);
    size_t count = 0;
    for (int i = 0; i < KEPT; i++)
      if (live[i]) {
        count++;
        CHECK(knows(&reader, live[i]));
      }
    CHECK_EQ(reader.live_count, count);
  }
  free(reader.live);
  finish();
}

TEST(what_was_overwritten_is_told_as_a_whole)
{
  reader_t reader = {.sites = 1};
  begin_without_oracle(2 * 64 * KIB);
  void *old[KEPT];
  for (int i = 0; i < KEPT; i++)
    old[i] = world_malloc(&w, 512, r);
  ask(&reader);
  for (int i = 1; i < KEPT; i++)
    world_free(&w, old[i]);
  for (int i = 0; i < 4 * CHUNK_WORDS; i++)
    world_free(&w, world_malloc(&w, 512, r));
  void *young = world_malloc(&w, 512, s);
  ask(&reader);
  CHECK(reader.whole && !reader.late);
  CHECK_EQ(reader.live_count, 2);
  CHECK(knows(&reader, old[0]) && knows(&reader, young));
  ask(&reader);
  CHECK(!reader.whole);
  CHECK_EQ(reader.live_count, 2);
  reader.since = UINT64_MAX / 2; /* of another process */
  ask(&reader);
  CHECK(reader.whole);
  free(reader.live);
  finish();
}

TEST(places_are_told_once)
{
  reader_t reader = {.sites = 1};
  char name[8000];
  memset(name, 'x', sizeof name);
  begin_without_oracle(MIB);
  ask(&reader);
  unsigned before = reader.sites;
  for (unsigned i = 0; i < 100; i++) { /* more than one section */
    memcpy(name, &i, sizeof i);
    site_add(1000 + i, name, sizeof name);
  }
  ask(&reader);
  CHECK_EQ(reader.sites, before + 100);
  ask(&reader);
  CHECK_EQ(reader.sites, before + 100);
  free(reader.live);
  finish();
}

/* ---- threads ---------------------------------------------------------------------- */

static void exchange_while_a_reader_asks(size_t bytes)
{
  reader_t reader = {.sites = 1};
  begin_without_oracle(bytes);
  ask(&reader);
  uint64_t since = reader.since; /* so that no event comes late */
  pthread_t threads[THREADS];
  start_exchange(threads);
  for (int i = 0; i < 5; i++) { /* while they run, or afterwards */
    ask(&reader);
    reader.since = reader.late ? 0 : since;
  }
  join_exchange(threads);
  do
    ask(&reader);
  while (reader.late);
  size_t live = 0;
  for (int i = 0; i < KEPT; i++)
    if (shared[i]) {
      live++;
      CHECK(knows(&reader, shared[i]));
      CHECK_OK(esper_free(w.core, shared[i]));
    }
  CHECK_EQ(reader.live_count, live);
  free(reader.live);
  finish();
}

TEST(a_reader_knows_what_threads_left)
{
  exchange_while_a_reader_asks(16 * MIB);
  exchange_while_a_reader_asks(8 * 64 * KIB); /* which is written over */
}

/* ---- readers that do not read -------------------------------------------------------- */

static void ask_without_reading(void *error)
{
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  close(pair[1]);
  *(int *)error = box_follow(pair[0], 0, 1);
  close(pair[0]);
}

TEST(a_reader_that_is_gone_ends_no_process)
{
  int error = 0;
  begin_without_oracle(MIB);
  void *p = world_malloc(&w, 512, r);
  check_on_another_thread(ask_without_reading, &error);
  CHECK_EQ(error, EPIPE);
  world_free(&w, p);
  finish();
}

static int narrow[2];
static reader_t slow;

static void *ask_slowly(void *error)
{
  *(int *)error = box_follow(narrow[0], slow.since, slow.sites);
  close(narrow[0]);
  return NULL;
}

static void fill_chunks(int count)
{
  for (int i = 0; i < count * CHUNK_WORDS / 3; i++)
    world_free(&w, world_malloc(&w, 512, r));
}

/* Threads record while it does not read, and it is told that parts are missing. */
TEST(a_slow_reader_holds_no_lock)
{
  int error = 0, small = 4096;
  pthread_t thread;
  box_header_t header;
  begin_without_oracle(4 * 64 * KIB);
  slow = (reader_t){.sites = 1};
  ask(&slow);
  fill_chunks(2);
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, narrow), 0);
  CHECK_EQ(setsockopt(narrow[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
  CHECK_EQ(pthread_create(&thread, NULL, ask_slowly, &error), 0);
  CHECK_EQ(recv(narrow[1], &header, sizeof header, MSG_WAITALL), sizeof header);
  CHECK(strcmp(header.why, "since") == 0);
  fill_chunks(8);
  slow.socket = narrow[1];
  receive(&slow);
  pthread_join(thread, NULL);
  CHECK_EQ(error, 0);
  CHECK(memmem(slow.data, slow.bytes, "LATE", 4));
  close(narrow[1]);
  free(slow.data);
  free(slow.live);
  finish();
}
