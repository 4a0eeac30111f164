/* test_cuda.c: the CUDA driver layer and the allocator of the process over a
 * libcuda made of nothing (fake_cuda.c). One scenario a process, since a
 * process loads its driver once: test_cuda SCENARIO. Run by
 * tests/test_cuda_driver.py, which builds both. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../csrc/device/cuda/cuda.h"
#include "../../csrc/instance.h"
#include "fake_cuda.h"
#include "scenarios.h"

#define CHECK(x)                                                             \
  do {                                                                       \
    if (!(x)) {                                                              \
      fprintf(stderr, "%s:%d: %s; %s\n", __FILE__, __LINE__, #x, context()); \
      exit(1);                                                               \
    }                                                                        \
  } while (0)

static fake_control *fake;
static const esper_driver *driver;
static char note[256];

static const char *context(void)
{
  static char text[1024];
  snprintf(text, sizeof text, "%s; last error: %s; of the driver: %s", note, esper_last_error(),
           driver ? driver->last_error(driver->self) : "none");
  return text;
}

static void load(void)
{
  CHECK(esper_cuda_driver(&driver) == ESPER_OK);
  void *library = dlopen(getenv("ESPER_ALLOC_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD);
  fake = library ? dlsym(library, "fake") : NULL;
  CHECK(fake);
}

/* ---- every function of the interface, as one line each ------------------ */

static void *a_stream, *an_event, *host_memory;
static uintptr_t an_address, a_range;
static uint64_t a_page, a_number;
static esper_page_name a_name;

/* A stream in capture 42, its last node stored. */
static void *captured_stream(void **node)
{
  void *stream = fake->stream(1);
  fake->capture(stream, 1, 42);
  *node = fake->node(stream);
  return stream;
}

static void *a_node, *some_nodes[8];

#define SELF driver->self
#define FUNCTIONS(F)                                                                            \
  F(memory_info, driver->memory_info(SELF, 1, &(size_t){0}, &(size_t){0}))                      \
  F(memory_total, driver->memory_total(SELF, 1, &(size_t){0}))                                  \
  F(device_synchronize, driver->device_synchronize(SELF, 1))                                    \
  F(memory_alloc, driver->memory_alloc(SELF, 1, 1 << 20, &an_address))                          \
  F(memory_free, driver->memory_free(SELF, 1, an_address))                                      \
  F(page_granularity, driver->page_granularity(SELF, 1, &(size_t){0}))                          \
  F(range_reserve, driver->range_reserve(SELF, 1, 2 << 20, &a_range))                           \
  F(page_create, driver->page_create(SELF, 1, 2 << 20, &a_page))                                \
  F(page_map, driver->page_map(SELF, 1, a_range, 2 << 20, a_page, NULL, 0))                     \
  F(page_access, driver->page_access(SELF, 1, a_range, 2 << 20, 0))                             \
  F(peer_check, driver->peer_check(SELF, 1, 0))                                                 \
  F(page_export, driver->page_export(SELF, 1, a_page, &a_name))                                 \
  F(page_unexport, driver->page_unexport(SELF, 1, &a_name))                                     \
  F(page_unmap, driver->page_unmap(SELF, 1, a_range, 2 << 20))                                  \
  F(page_release, driver->page_release(SELF, 1, a_page))                                        \
  F(range_free, driver->range_free(SELF, 1, a_range, 2 << 20))                                  \
  F(host_alloc, driver->host_alloc(SELF, 1, 1 << 20, &host_memory))                             \
  F(copy_to_host, driver->copy_to_host(SELF, 1, fake->stream(1), host_memory, an_address, 512)) \
  F(copy_to_device,                                                                             \
    driver->copy_to_device(SELF, 1, fake->stream(1), an_address, host_memory, 512))             \
  F(memory_zero, driver->memory_zero(SELF, 1, fake->stream(1), an_address, 512))                \
  F(host_free, driver->host_free(SELF, 1, host_memory))                                         \
  F(stream_create, driver->stream_create(SELF, 1, &a_stream))                                   \
  F(stream_id, driver->stream_id(SELF, 1, a_stream, &a_number))                                 \
  F(legacy_stream_id, driver->stream_id(SELF, 1, NULL, &a_number))                              \
  F(stream_capture, driver->stream_capture(SELF, 1, a_stream, &a_number))                       \
  F(legacy_stream_capture, driver->stream_capture(SELF, 1, NULL, &a_number))                    \
  F(capture_tails,                                                                              \
    driver->capture_tails(SELF, 1, captured_stream(&a_node), 42, some_nodes, &(size_t){8}))     \
  F(capture_before, driver->capture_before(SELF, 1, captured_stream(&a_node), 42, a_node,       \
                                           some_nodes, &(size_t){8}))                           \
  F(event_create, driver->event_create(SELF, 1, &an_event))                                     \
  F(event_record, driver->event_record(SELF, 1, an_event, a_stream))                            \
  F(legacy_event_record, driver->event_record(SELF, 1, an_event, NULL))                         \
  F(event_record_all, driver->event_record_all(SELF, 1, an_event))                              \
  F(stream_wait, driver->stream_wait(SELF, 1, a_stream, an_event))                              \
  F(event_query, driver->event_query(SELF, 1, an_event))                                        \
  F(event_synchronize, driver->event_synchronize(SELF, 1, an_event))                            \
  F(event_wait, driver->event_wait(SELF, 1, an_event, 0))                                       \
  F(event_destroy, driver->event_destroy(SELF, 1, an_event))                                    \
  F(stream_destroy, driver->stream_destroy(SELF, 1, a_stream))

#define DEFINE(name, call)            \
  static esper_status do_##name(void) \
  {                                   \
    return call;                      \
  }
FUNCTIONS(DEFINE)

static const struct {
  const char *name;
  esper_status (*call)(void);
} functions[] = {
#define ROW(name, call) {#name, do_##name},
    FUNCTIONS(ROW)};

enum { FUNCTION_COUNT = sizeof functions / sizeof *functions };

static void set_thread(int current, int mode)
{
  fake->set_current(current);
  fake->set_mode(mode);
}

static void check_thread(int current, int mode)
{
  CHECK(fake->current() == current);
  CHECK(fake->depth() == (current >= 0));
  CHECK(fake->mode() == mode);
}

/* The thread is as it was after every call, from every state, in the middle of
 * a capture that any unsafe call would break. */
SCENARIO(balance)
{
  load();
  fake->capturing = 1;
  for (int current = -1; current < 2; current++)
    for (int mode = 0; mode <= 2; mode++)
      for (int i = 0; i < FUNCTION_COUNT; i++) {
        snprintf(note, sizeof note, "%s, context %d, mode %d", functions[i].name, current, mode);
        set_thread(current, mode);
        int pushes = fake->calls("cuCtxPushCurrent");
        CHECK(functions[i].call() == ESPER_OK);
        check_thread(current, mode);
        if (current == 1) /* already right */
          CHECK(fake->calls("cuCtxPushCurrent") == pushes);
      }
  CHECK(fake->unsafe_calls == 0);
  CHECK(fake->bad_requests == 0);
  CHECK(fake->live_bytes == 0);
  CHECK(fake->live_mappings == 0);
  CHECK(fake->calls("cuDevicePrimaryCtxRetain") == 1);
}

/* Every entry point refuses once, in every function: the status is right, the
 * message names the function, and the thread is as it was. */
SCENARIO(faults)
{
  static const struct {
    int result;
    esper_status status;
  } kinds[] = {{2, ESPER_OUT_OF_MEMORY}, {4, ESPER_SHUT_DOWN},      {709, ESPER_SHUT_DOWN},
               {600, ESPER_NOT_READY},   {719, ESPER_DEVICE_ERROR}, {801, ESPER_UNSUPPORTED},
               {900, ESPER_CAPTURING},   {906, ESPER_CAPTURING},    {908, ESPER_CAPTURING},
               {909, ESPER_DEVICE_ERROR}};
  esper_cuda_entry_point entry;
  int hits = 0;
  load();
  for (int e = 0; esper_cuda_get_entry_point(e, &entry); e++) {
    if (strcmp(entry.name, "cuCtxPopCurrent") == 0)
      continue; /* nobody could put the context back */
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
      for (int i = 0; i < FUNCTION_COUNT; i++) {
        int before = fake->calls(entry.name);
        snprintf(note, sizeof note, "%s with %s answering %d", functions[i].name, entry.name,
                 kinds[k].result);
        set_thread(0, 1);
        fake->fail(entry.name, 1, kinds[k].result);
        esper_status status = functions[i].call();
        fake->fail("", 0, 0);
        check_thread(0, 1);
        if (fake->calls(entry.name) == before) {
          CHECK(status == ESPER_OK);
          continue;
        }
        hits++;
        if (kinds[k].status == ESPER_UNSUPPORTED && strcmp(entry.name, "cuMemCreate") == 0) {
          CHECK(status == ESPER_OK); /* another kind of page was asked for */
          continue;
        }
        CHECK(status == kinds[k].status);
        CHECK(strncmp(driver->last_error(SELF), entry.name, strlen(entry.name)) == 0);
        CHECK(driver->last_error(SELF)[strlen(entry.name)] == ':');
        CHECK(functions[i].call() == ESPER_OK); /* nothing had happened */
      }
  }
  CHECK(hits > 200);
  CHECK(fake->live_bytes == 0);
  CHECK(fake->live_mappings == 0);
}

SCENARIO(messages)
{
  load();
  fake->fail("cuMemAlloc", 1, 2);
  CHECK(driver->memory_alloc(SELF, 0, 512, &an_address) == ESPER_OUT_OF_MEMORY);
  CHECK(strcmp(driver->last_error(SELF), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)") ==
        0);
  fake->fail("cuMemAlloc", 1, 12345);
  CHECK(driver->memory_alloc(SELF, 0, 512, &an_address) == ESPER_DEVICE_ERROR);
  CHECK(strcmp(driver->last_error(SELF), "cuMemAlloc: CUDA error 12345") == 0);
  CHECK(driver->memory_alloc(SELF, 2, 512, &an_address) == ESPER_INVALID);
  CHECK(strcmp(driver->last_error(SELF), "there is no CUDA device 2; this process sees 2") == 0);
  CHECK(driver->memory_alloc(SELF, -1, 512, &an_address) == ESPER_INVALID);
}

SCENARIO(captures)
{
  uint64_t capture = 7;
  load();
  void *stream = fake->stream(1);
  for (int current = -1; current < 2; current++) {
    fake->set_current(current);
    fake->capture(stream, 0, 0);
    CHECK(driver->stream_capture(SELF, 1, stream, &capture) == ESPER_OK && capture == 0);
    int infos = fake->calls("cuStreamGetCaptureInfo");
    CHECK(driver->stream_capture(SELF, 1, stream, &capture) == ESPER_OK && capture == 0);
    CHECK(fake->calls("cuStreamGetCaptureInfo") == infos);
    fake->capture(stream, 1, 42);
    CHECK(driver->stream_capture(SELF, 1, stream, &capture) == ESPER_OK && capture == 42);
    fake->capture(stream, 2, 42); /* invalidated, not ended */
    CHECK(driver->stream_capture(SELF, 1, stream, &capture) == ESPER_OK);
    CHECK(capture == ESPER_CAPTURE_INVALID);
    CHECK(fake->current() == current);
  }
  /* While a blocking stream is captured, the driver will not speak of the
   * legacy stream. */
  fake->fail("cuStreamIsCapturing", 1, 906);
  CHECK(driver->stream_capture(SELF, 1, NULL, &capture) == ESPER_CAPTURING);
  /* An event that was recorded inside a capture. */
  fake->capture(stream, 1, 43);
  CHECK(driver->event_create(SELF, 1, &an_event) == ESPER_OK);
  CHECK(driver->event_query(SELF, 1, an_event) == ESPER_OK); /* fresh */
  CHECK(driver->event_record(SELF, 1, an_event, stream) == ESPER_OK);
  CHECK(driver->event_query(SELF, 1, an_event) == ESPER_CAPTURING);
}

/* What comes before a stream's next operation in its capture. Asking adds nothing. */
SCENARIO(graphs)
{
  void *before[8], *tails[8];
  size_t count;
  load();
  void *stream = fake->stream(1), *other = fake->stream(1);
  fake->capture(stream, 1, 42);
  fake->capture(other, 1, 42);
  count = 8;
  CHECK(driver->capture_tails(SELF, 1, stream, 42, tails, &count) == ESPER_OK && count == 0);
  void *a = fake->node(stream), *b = fake->node(other);
  count = 8;
  CHECK(driver->capture_tails(SELF, 1, stream, 42, tails, &count) == ESPER_OK);
  CHECK(count == 1 && tails[0] == a);
  fake->depend(stream, b); /* as the program's own wait for an event does */
  for (int i = 0; i < 2; i++) {
    count = 3;
    CHECK(driver->capture_tails(SELF, 1, stream, 42, tails, &count) == ESPER_OK);
    CHECK(count == 2 && tails[0] == a && tails[1] == b);
  }
  count = 2; /* there may be more than that */
  CHECK(driver->capture_tails(SELF, 1, stream, 42, tails, &count) == ESPER_UNSUPPORTED);
  CHECK(strstr(driver->last_error(SELF), "depends on 2 others, or more"));
  void *c = fake->node(stream);
  count = 3;
  CHECK(driver->capture_before(SELF, 1, stream, 42, c, before, &count) == ESPER_OK);
  CHECK(count == 2 && before[0] == a && before[1] == b);
  count = 2;
  CHECK(driver->capture_before(SELF, 1, stream, 42, c, before, &count) == ESPER_UNSUPPORTED);
  count = 8;
  CHECK(driver->capture_tails(SELF, 1, stream, 42, tails, &count) == ESPER_OK);
  CHECK(count == 1 && tails[0] == c);
  /* Another capture, or one that is over or invalid: no node is touched. */
  int reads = fake->calls("cuGraphNodeGetDependencies");
  for (int status = 0; status < 3; status++) {
    fake->capture(stream, status, status == 1 ? 43 : 42);
    count = 8;
    CHECK(driver->capture_tails(SELF, 1, stream, 42, tails, &count) == ESPER_INVALID);
    CHECK(driver->capture_before(SELF, 1, stream, 42, b, before, &count) == ESPER_INVALID);
    CHECK(strstr(driver->last_error(SELF), "no longer in capture 42"));
  }
  CHECK(fake->calls("cuGraphNodeGetDependencies") == reads);
}

static unsigned long long microseconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u;
}

/* Waits for an event, and tells how often the driver was asked about it. */
static esper_status event_wait(unsigned limit, int *asked)
{
  int before = fake->calls("cuEventQuery");
  esper_status status = driver->event_wait(SELF, 1, an_event, limit);
  *asked = fake->calls("cuEventQuery") - before;
  return status;
}

/* The host waits for an event for a limited time. */
SCENARIO(event_wait)
{
  enum { LONG = 600000000 };
  int asked;
  load();
  void *stream = fake->stream(1);
  CHECK(driver->event_create(SELF, 1, &an_event) == ESPER_OK);
  CHECK(event_wait(LONG, &asked) == ESPER_OK && asked == 1); /* never recorded */
  CHECK(driver->event_record(SELF, 1, an_event, stream) == ESPER_OK);
  CHECK(event_wait(0, &asked) == ESPER_OK && asked == 1);
  for (int after = 1; after < 100; after += 49) {
    fake->finish_after(after);
    CHECK(event_wait(LONG, &asked) == ESPER_OK && asked == after + 1);
  }
  /* The limit, though the event never completes. */
  fake->finish(0);
  CHECK(event_wait(0, &asked) == ESPER_NOT_READY && asked == 1);
  unsigned limit = 3000;
  do { /* longer where the machine is too busy for a second question */
    unsigned long long begin = microseconds();
    CHECK(event_wait(limit, &asked) == ESPER_NOT_READY);
    CHECK(microseconds() - begin >= limit);
    CHECK((unsigned)asked < limit); /* it leaves the processor to others */
  } while (asked <= 2 && (limit *= 2) < 10000000);
  CHECK(asked > 2);
  /* What fails at once, and what fails in the end. */
  for (int nth = 1; nth < 4; nth++) {
    fake->fail("cuEventQuery", nth, 719);
    CHECK(event_wait(LONG, &asked) == ESPER_DEVICE_ERROR && asked == nth);
    CHECK(strstr(driver->last_error(SELF), "CUDA_ERROR_LAUNCH_FAILED"));
  }
  fake->finish(1);
  fake->capture(stream, 1, 42);
  CHECK(driver->event_record(SELF, 1, an_event, stream) == ESPER_OK);
  CHECK(event_wait(LONG, &asked) == ESPER_CAPTURING && asked == 1);
}

SCENARIO(streams)
{
  uint64_t on_0, on_1;
  int device = -1;
  load();
  CHECK(driver->stream_id(SELF, 0, NULL, &on_0) == ESPER_OK);
  CHECK(driver->stream_id(SELF, 1, NULL, &on_1) == ESPER_OK);
  CHECK(on_0 != on_1); /* handle 0 is another stream on each device */
  fake->set_current(1);
  CHECK(driver->stream_id(SELF, 0, NULL, &on_1) == ESPER_OK && on_1 == on_0);
  CHECK(esper_cuda_stream_device(NULL, &device) == ESPER_OK && device == 1);
  CHECK(esper_cuda_stream_device(fake->stream(0), &device) == ESPER_OK && device == 0);
  CHECK(fake->current() == 1 && fake->depth() == 1);
  fake->set_current(-1);
  CHECK(esper_cuda_stream_device(NULL, &device) == ESPER_DEVICE_ERROR);
  CHECK(esper_cuda_stream_device(fake->stream(1), &device) == ESPER_OK && device == 1);
  fake->fail("cuStreamGetCtx", 1, 201); /* as a thread without a context may be told */
  CHECK(esper_cuda_stream_device(fake->stream(0), &device) == ESPER_OK && device == 0);
  CHECK(fake->current() == -1 && fake->depth() == 0);
}

/* Threads may be first at the same time. */
static void *first_call(void *barrier)
{
  uintptr_t address;
  const esper_driver *mine;
  pthread_barrier_wait(barrier);
  if (esper_cuda_driver(&mine) != ESPER_OK ||
      mine->memory_alloc(mine->self, 1, 512, &address) != ESPER_OK ||
      mine->memory_free(mine->self, 1, address) != ESPER_OK)
    return NULL;
  return esper_instance();
}

SCENARIO(threads)
{
  pthread_t threads[8];
  pthread_barrier_t barrier;
  void *cores[8];
  pthread_barrier_init(&barrier, NULL, 8);
  for (int i = 0; i < 8; i++)
    CHECK(pthread_create(&threads[i], NULL, first_call, &barrier) == 0);
  for (int i = 0; i < 8; i++)
    pthread_join(threads[i], &cores[i]);
  load();
  for (int i = 0; i < 8; i++)
    CHECK(cores[i] && cores[i] == cores[0]);
  CHECK(fake->calls("cuInit") == 1);
  CHECK(fake->calls("cuDevicePrimaryCtxRetain") <= 2); /* once a device */
}

/* A child forked after initialisation gets an answer, and soon. */
SCENARIO(fork)
{
  load();
  void *ours = esper_alloc_malloc(1 << 20, 0, NULL);
  CHECK(ours);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const esper_driver *again;
    alarm(200);
    CHECK(driver->memory_alloc(SELF, 0, 512, &an_address) == ESPER_DEVICE_ERROR);
    CHECK(strstr(driver->last_error(SELF), "forked") && strstr(driver->last_error(SELF), "spawn"));
    CHECK(driver->stream_capture(SELF, 0, NULL, &a_number) == ESPER_DEVICE_ERROR);
    CHECK(esper_cuda_driver(&again) == ESPER_UNSUPPORTED);
    CHECK(!esper_alloc_malloc(512, 0, NULL));
    CHECK(strstr(esper_last_error(), "forked"));
    CHECK(!esper_instance());
    esper_alloc_free(ours, 0, 0, NULL); /* the collector of an inherited tensor */
    exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(esper_alloc_malloc(512, 0, NULL)); /* the parent goes on */
}

/* ---- the allocator of the process -------------------------------------- */

static uint64_t calls_of(const char *name)
{
  const char *candidate;
  for (int i = 0; (candidate = esper_driver_call_name(i)); i++)
    if (strcmp(candidate, name) == 0)
      return esper_driver_calls(esper_instance(), i);
  CHECK(!"a driver call of that name");
  return 0;
}

static esper_counters counters_of(int device)
{
  esper_counters counters;
  esper_retire(esper_instance(), device);
  CHECK(esper_get_counters(esper_instance(), device, &counters) == ESPER_OK);
  return counters;
}

SCENARIO(allocator)
{
  size_t size = 0;
  load();
  void *stream = fake->stream(0);
  CHECK(!esper_alloc_malloc(0, 0, stream));
  CHECK(!esper_alloc_malloc(512, 9, stream));
  CHECK(!esper_alloc_malloc((size_t)1 << 40, 0, stream));
  char *small = esper_alloc_malloc(1000, 0, stream);
  CHECK(small);
  CHECK(esper_alloc_base(small + 8, &size) && size >= 1000);
  CHECK(!esper_alloc_base(&size, &size) && size == 0);
  esper_alloc_free(NULL, 0, 0, stream);
  esper_alloc_free(&size, 0, 0, stream); /* not ours: ignored */
  esper_alloc_free(small, 0, 0, stream);
  esper_alloc_free(small, 0, 0, stream); /* twice: ignored */
  esper_alloc_init(2);
  esper_alloc_set_memory_fraction(0.5, 0);
  CHECK(esper_get_memory_fraction(esper_instance(), 0) == 0.5);
  CHECK(fake->live_bytes > 0);
  esper_alloc_reset();
  CHECK(fake->live_bytes == 0);
  CHECK(esper_core_is_valid(esper_instance()));
}

/* A mark is one event on the stream that was named, on that stream's device;
 * the memory is pending until it has completed. */
SCENARIO(uses)
{
  load();
  esper_alloc_set_record_stream_visible(1);
  void *home = fake->stream(0), *reader = fake->stream(1);
  void *block = esper_alloc_malloc(1 << 20, 0, home);
  CHECK(block);
  uint64_t records = calls_of("event_record");
  fake->finish(0);
  fake->set_current(0);
  CHECK(esper_alloc_record_use((char *)block + 100, reader) == ESPER_OK);
  CHECK(calls_of("event_record") == records + 1);
  CHECK(esper_alloc_record_use(block, home) == ESPER_OK); /* its own stream */
  CHECK(calls_of("event_record") == records + 1);
  CHECK(fake->current() == 0);
  esper_alloc_free(block, 0, 0, home);
  CHECK(counters_of(0).bytes_pending == 1 << 20);
  fake->finish(1);
  CHECK(counters_of(0).bytes_pending == 0);

  block = esper_alloc_malloc(1 << 20, 0, home);
  fake->finish(0);
  esper_alloc_record_stream(block, reader);
  esper_alloc_free(block, 0, 0, home);
  CHECK(counters_of(0).bytes_pending == 1 << 20);
  fake->finish(1);

  /* A touch may come before the work. The stream may be destroyed, so what it uses is held until
   * the stream is seen again. */
  void *late = fake->stream(1);
  uint64_t held = counters_of(0).blocks_held;
  block = esper_alloc_malloc(1 << 20, 0, home);
  fake->finish(0);
  records = calls_of("event_record");
  CHECK(esper_alloc_touch(block, late) == ESPER_OK);
  CHECK(calls_of("event_record") == records);
  CHECK(fake->current() == 0);
  esper_alloc_free(block, 0, 0, home);
  CHECK(counters_of(0).blocks_held == held + 1);
  CHECK(esper_alloc_touch(&records, late) == ESPER_OK); /* memory of others is skipped */
  CHECK(calls_of("event_record") == records + 1);
  CHECK(counters_of(0).blocks_held == held);
  CHECK(esper_core_is_valid(esper_instance()));
}

/* What a mark asks of the driver, which is most of what it costs: one event, whether
 * the stream is captured, before the event and after it, and for a stream that may
 * have been destroyed its id. No context is made current, and no event is created. */
SCENARIO(mark_cost)
{
  enum { MARKS = 200 };
  static const struct {
    const char *name;
    int mortal, immortal; /* calls for each mark */
  } costs[] = {{"cuEventRecord", 1, 1},
               {"cuStreamIsCapturing", 2, 2},
               {"cuStreamGetId", 1, 0},
               {"cuStreamGetCaptureInfo", 0, 0},
               {"cuStreamGetCtx", 0, 0},
               {"cuCtxGetCurrent", 0, 0},
               {"cuCtxPushCurrent", 0, 0},
               {"cuCtxGetDevice", 0, 0},
               {"cuEventCreate", 0, 0},
               {"cuEventQuery", 0, 0},
               {"cuThreadExchangeStreamCaptureMode", 0, 0}};
  enum { COSTS = sizeof costs / sizeof *costs };
  int before[COSTS];
  load();
  fake->set_current(0);
  fake->finish(0);
  void *home = fake->stream(0), *reader = fake->stream(0);
  void *block = esper_alloc_malloc(1 << 20, 0, home);
  const void *marked = block;
  esper_stream immortal = {reader, 0, ESPER_STREAM_IMMORTAL};
  for (int lives = 0; lives < 2; lives++) {
    for (int i = -4; i < MARKS; i++) { /* the first ones make what is needed */
      for (int k = 0; k < COSTS && i == 0; k++)
        before[k] = fake->calls(costs[k].name);
      if (lives && i < 0)
        CHECK(esper_record_use(esper_instance(), &marked, 1, immortal, 0, NULL) == ESPER_OK);
      CHECK(esper_alloc_record_use(block, reader) == ESPER_OK);
    }
    for (int k = 0; k < COSTS; k++) {
      snprintf(note, sizeof note, "%s, %s stream", costs[k].name, lives ? "immortal" : "mortal");
      CHECK(fake->calls(costs[k].name) - before[k] ==
            MARKS * (lives ? costs[k].immortal : costs[k].mortal));
    }
  }
  CHECK(counters_of(0).uses_pending == 1);
}

/* Who cannot tell us of record_stream gets frees that wait for all streams. */
SCENARIO(blind)
{
  load();
  void *home = fake->stream(0);
  void *block = esper_alloc_malloc(1 << 20, 0, home);
  CHECK(block);
  fake->finish(0);
  esper_alloc_free(block, 0, 0, home);
  CHECK(counters_of(0).bytes_pending == 1 << 20);
  fake->finish(1);
  CHECK(counters_of(0).bytes_pending == 0);
  esper_alloc_free(esper_alloc_malloc(1 << 20, 0, home), 0, 0, home);
  CHECK(counters_of(0).bytes_pending == 0);
  /* Told that record_stream is seen, a free owes nothing to other streams. */
  esper_alloc_set_record_stream_visible(1);
  block = esper_alloc_malloc(1 << 20, 0, home);
  fake->finish(0);
  esper_alloc_free(block, 0, 0, home);
  CHECK(counters_of(0).bytes_pending == 0);
}

/* ---- pages of several processes ------------------------------------------ */

static void expect_refusal(esper_page_name name, const char *why)
{
  uint64_t page = 77;
  CHECK(driver->page_import(SELF, 0, &name, &page) == ESPER_INVALID);
  CHECK(strstr(driver->last_error(SELF), why));
  CHECK(page == 77);
}

/* The other process: it was there before CUDA was. */
static void take_pages(int from, int to)
{
  esper_page_name names[3];
  uint64_t page = 0;
  alarm(600);
  CHECK(read(from, names, sizeof names) == sizeof names);
  load();
  set_thread(-1, 0);
  int files = open_files();
  for (int i = 0; i < 100; i++) {
    CHECK(driver->page_import(SELF, 0, &names[i % 2], &page) == ESPER_OK);
    CHECK(page == (i % 2 ? 1001u : 1000u)); /* as fake_cuda.c numbers them */
  }
  check_thread(-1, 0);
  expect_refusal(names[2], "was freed");
  esper_page_name wrong = names[0];
  wrong.key++;
  expect_refusal(wrong, "it has ended");
  fake->fail("cuMemImportFromShareableHandle", 1, 719);
  CHECK(driver->page_import(SELF, 0, &names[0], &page) == ESPER_DEVICE_ERROR);
  CHECK(open_files() == files);
  CHECK(write(to, "ok", 2) == 2);
  CHECK(read(from, names, sizeof names) == 0); /* the parent has ended by now */
  exit(0);
}

/* Names travel, and nothing else: no file of the parent's is inherited. */
SCENARIO(sharing)
{
  enum { MANY = 3000 };
  int down[2], up[2];
  char answer[2];
  esper_page_name names[3], many;
  CHECK(pipe(down) == 0 && pipe(up) == 0);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    close(down[1]);
    take_pages(down[0], up[1]);
  }
  load();
  close(down[0]);
  for (int i = 0; i < 2; i++) {
    CHECK(driver->page_create(SELF, i, 2 << 20, &a_page) == ESPER_OK);
    CHECK(driver->page_export(SELF, i, a_page, &names[i]) == ESPER_OK);
  }
  CHECK(names[0].number != names[1].number && names[0].process == (uint64_t)getpid());
  CHECK(driver->page_export(SELF, 1, a_page, &names[2]) == ESPER_OK);
  CHECK(driver->page_unexport(SELF, 1, &names[2]) == ESPER_OK);
  int files = open_files();
  for (int i = 0; i < MANY; i++)
    CHECK(driver->page_export(SELF, 1, a_page, &many) == ESPER_OK);
  CHECK(open_files() < files + MANY / 2); /* the newest stay open */
  files = open_files();
  CHECK(write(down[1], names, sizeof names) == sizeof names);
  CHECK(read(up[0], answer, 2) == 2);
  CHECK(driver->page_import(SELF, 1, &many, &a_page) == ESPER_OK); /* one's own */
  for (int i = 0; open_files() != files; i++) { /* the thread that answers is closing */
    CHECK(i < 10000);
    usleep(10000);
  }
  close(down[1]);
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A driver that makes no pages which can be shared makes others, and is asked once. */
SCENARIO(no_sharing)
{
  load();
  int calls = fake->calls("cuMemCreate");
  for (int i = 0; i < 3; i++)
    CHECK(driver->page_create(SELF, 1, 2 << 20, &a_page) == ESPER_OK);
  CHECK(fake->calls("cuMemCreate") <= calls + 4);
  CHECK(driver->page_export(SELF, 1, a_page, &a_name) == ESPER_UNSUPPORTED);
  CHECK(strstr(driver->last_error(SELF),
               "cannot make pages on CUDA device 1 that other processes can open"));
}

/* What is refused later, or for another reason, says nothing of other pages. */
SCENARIO(sharing_again)
{
  uint64_t ours;
  load();
  fake->fail("cuMemCreate", 1, 2); /* out of memory */
  CHECK(driver->page_create(SELF, 1, 2 << 20, &a_page) == ESPER_OUT_OF_MEMORY);
  CHECK(driver->page_create(SELF, 1, 2 << 20, &ours) == ESPER_OK);
  fake->fail("cuMemCreate", 1, 1); /* a wrong value */
  CHECK(driver->page_create(SELF, 1, 2 << 20, &a_page) == ESPER_OK);
  CHECK(driver->page_export(SELF, 1, ours, &a_name) == ESPER_OK);
}

/* Pages are open to their device, to its peers, and to nobody else. */
SCENARIO(peers)
{
  enum { MANY = 40, CLOSED = 0, OPEN = 3 }; /* as cuda.h has them */
  int peers[MANY] = {0}, one = 0;
  load();
  CHECK(driver->range_reserve(SELF, 1, 2 << 20, &a_range) == ESPER_OK);
  CHECK(driver->page_create(SELF, 1, 2 << 20, &a_page) == ESPER_OK);
  CHECK(driver->page_map(SELF, 1, a_range, 2 << 20, a_page, NULL, 0) == ESPER_OK);
  CHECK(fake->access[1] == OPEN);
  CHECK(fake->access[0] == CLOSED);
  CHECK(driver->page_access(SELF, 1, a_range, 2 << 20, 0) == ESPER_OK);
  CHECK(fake->access[0] == OPEN);
  CHECK(fake->access[1] == OPEN);
  CHECK(driver->page_access(SELF, 1, a_range, 2 << 20, 7) == ESPER_INVALID);
  CHECK(driver->page_unmap(SELF, 1, a_range, 2 << 20) == ESPER_OK);
  int calls = fake->calls("cuMemSetAccess");
  CHECK(driver->page_map(SELF, 1, a_range, 2 << 20, a_page, &one, 1) == ESPER_OK);
  CHECK(fake->calls("cuMemSetAccess") == calls + 1);
  CHECK(fake->access[0] == OPEN);
  CHECK(driver->page_unmap(SELF, 1, a_range, 2 << 20) == ESPER_OK);
  CHECK(driver->page_map(SELF, 1, a_range, 2 << 20, a_page, peers, MANY) == ESPER_OK);
  CHECK(fake->calls("cuMemSetAccess") == calls + 4);
  CHECK(driver->page_unmap(SELF, 1, a_range, 2 << 20) == ESPER_OK);
  CHECK(driver->peer_check(SELF, 1, 0) == ESPER_OK);
  CHECK(driver->peer_check(SELF, 1, 9) == ESPER_INVALID);
  fake->reach = 0;
  CHECK(driver->peer_check(SELF, 1, 0) == ESPER_UNSUPPORTED);
  CHECK(strstr(driver->last_error(SELF), "device 0 cannot access the memory of device 1"));
}

/* A stream whose device cannot be found out still protects. */
SCENARIO(unknown_stream)
{
  load();
  esper_alloc_set_record_stream_visible(1);
  void *home = fake->stream(0);
  void *block = esper_alloc_malloc(1 << 20, 0, home);
  fake->finish(0);
  fake->fail("cuStreamGetCtx", 1, 400);
  CHECK(esper_alloc_record_use(block, fake->stream(0)) == ESPER_DEVICE_ERROR);
  fake->fail("cuStreamGetCtx", 1, 400);
  esper_alloc_record_stream(block, fake->stream(0));
  esper_alloc_free(block, 0, 0, home);
  CHECK(counters_of(0).bytes_pending == 1 << 20);
}

/* Of each line of the standard input, what it would mean as ESPER_ALLOC_ALLOWANCE: bytes, or why
 * there is no allocator. It tries again after each refusal, so only the last line may be right. */
SCENARIO(allowance)
{
  char line[256];
  esper_config config;
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    setenv("ESPER_ALLOC_ALLOWANCE", line, 1);
    if (!esper_instance()) {
      puts(esper_last_error());
      continue;
    }
    esper_get_config(esper_instance(), &config);
    printf("%zu\n", config.allowance);
    break;
  }
}

SCENARIO(segments)
{
  esper_config config;
  CHECK(!esper_instance());
  CHECK(strcmp(esper_last_error(), "ESPER_ALLOC_SEGMENTS=big is not a kind of segments: use "
                                   "auto, mapped or classic") == 0);
  setenv("ESPER_ALLOC_SEGMENTS", "mapped", 1);
  CHECK(esper_instance()); /* it tries again */
  esper_get_config(esper_instance(), &config);
  CHECK(config.segments == ESPER_SEGMENTS_MAPPED);
}

/* FAKE_SEGMENTS: what is expected. */
SCENARIO(segments_chosen)
{
  esper_config config;
  CHECK(esper_instance());
  esper_get_config(esper_instance(), &config);
  CHECK((int)config.segments == atoi(getenv("FAKE_SEGMENTS")));
}

/* ---- drivers that lack something --------------------------------------- */

/* Prints why there is no driver; the Python test knows what it should say. */
SCENARIO(refused)
{
  CHECK(esper_cuda_driver(&driver) == ESPER_UNSUPPORTED);
  CHECK(!esper_instance());
  CHECK(!esper_alloc_malloc(512, 0, NULL));
  int device;
  CHECK(esper_alloc_record_use(&device, NULL) == ESPER_UNSUPPORTED);
  CHECK(esper_alloc_touch(&device, NULL) == ESPER_UNSUPPORTED);
  puts(esper_last_error());
}

SCENARIO(old) /* 11.8 */
{
  load();
  CHECK(driver->stream_id(SELF, 0, NULL, &a_number) == ESPER_UNSUPPORTED);
  CHECK(strstr(driver->last_error(SELF), "CUDA 12.0, this driver is 11.8"));
  CHECK(driver->event_record_all(SELF, 0, NULL) == ESPER_UNSUPPORTED);
  CHECK(driver->memory_alloc(SELF, 0, 512, &an_address) == ESPER_OK);
}

SCENARIO(no_virtual_memory)
{
  size_t granularity = 1;
  load();
  CHECK(driver->page_granularity(SELF, 0, &granularity) == ESPER_UNSUPPORTED);
  CHECK(granularity == 0);
  CHECK(driver->page_create(SELF, 0, 2 << 20, &a_page) == ESPER_UNSUPPORTED);
  CHECK(strstr(driver->last_error(SELF), "no virtual memory management"));
  check_thread(-1, 0);
}

SCENARIO(old_get_proc_address)
{
  load();
  CHECK(driver->memory_alloc(SELF, 0, 512, &an_address) == ESPER_OK);
}
