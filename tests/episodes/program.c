#include "program.h"

#include <stdio.h>

struct program p;

void machine_noticed(const char *report)
{
  found("%s", report);
}

void must(esper_status status, const char *call)
{
  if (status != ESPER_OK)
    found("%s: %s: %s", call, esper_status_name(status), esper_last_error());
}

/* ---- a driver that refuses, and notices ----------------------------------- */

static const esper_driver *true_driver;
static esper_driver driver;
static atomic_bool refuses_queries;
static atomic_int patience = -1;
static void (*_Atomic wait_hook)(void);

esper_driver *program_driver(void)
{
  return &driver;
}

void refuse_queries(bool refuse)
{
  atomic_store(&refuses_queries, refuse);
}

void limit_waits(int count)
{
  atomic_store(&patience, count);
}

void before_wait(void (*hook)(void))
{
  atomic_store(&wait_hook, hook);
}

static esper_status query_or_refuse(void *self, int device, void *event)
{
  if (atomic_load(&refuses_queries))
    return ESPER_DEVICE_ERROR;
  return true_driver->event_query(self, device, event);
}

static esper_status synchronize_or_find(void *self, int device, void *event)
{
  if (atomic_load(&patience) >= 0)
    found("the host waits for what will never complete");
  return true_driver->event_synchronize(self, device, event);
}

static esper_status wait_or_find(void *self, int device, void *event, unsigned microseconds)
{
  if (atomic_load(&patience) >= 0 && atomic_fetch_sub(&patience, 1) == 0)
    found("the host waits again and again for what will never complete");
  return true_driver->event_wait(self, device, event, microseconds);
}

static void must_be_cores(const void *stream, const char *call)
{
  for (int i = 0; i < MACHINE_STREAMS; i++) /* others may be gone, and their handles the core's */
    if (handle(i) == stream)
      found("%s on a stream of the program's", call);
}

static esper_status stream_wait_of_cores(void *self, int device, void *stream, void *event)
{
  must_be_cores(stream, "stream_wait");
  void (*hook)(void) = atomic_load(&wait_hook);
  if (hook)
    hook();
  return true_driver->stream_wait(self, device, stream, event);
}

static esper_status copy_to_host_of_cores(void *self, int device, void *stream, void *to,
                                          uintptr_t from, size_t size)
{
  must_be_cores(stream, "copy_to_host");
  return true_driver->copy_to_host(self, device, stream, to, from, size);
}

static esper_status copy_to_device_of_cores(void *self, int device, void *stream, uintptr_t to,
                                            const void *from, size_t size)
{
  must_be_cores(stream, "copy_to_device");
  return true_driver->copy_to_device(self, device, stream, to, from, size);
}

static esper_status memory_zero_of_cores(void *self, int device, void *stream, uintptr_t address,
                                         size_t size)
{
  must_be_cores(stream, "memory_zero");
  return true_driver->memory_zero(self, device, stream, address, size);
}

/* ---- memory --------------------------------------------------------------- */

void *handle(int stream)
{
  return p.streams[stream].handle;
}

block take_for(size_t size, int owner, int writer)
{
  block b = {.size = size, .owner = owner, .writer = writer};
  void *at = NULL;
  esper_status status = esper_malloc(p.core, size, p.streams[owner], &at);
  atomic_fetch_add(&p.step, 1);
  if (status == ESPER_OUT_OF_MEMORY) {
    atomic_fetch_add(&p.refused, 1);
    return b;
  }
  must(status, "malloc");
  atomic_fetch_add(&p.handed_out, 1);
  machine_owner_begin(at, size, handle(writer));
  b.at = at;
  return b;
}

block take(size_t size, int stream)
{
  return take_for(size, stream, stream);
}

void write_block(block *b)
{
  b->tag = atomic_fetch_add(&p.tag, 1) + 1;
  if (b->at)
    machine_write(handle(b->writer), b->at, b->size, b->tag);
}

block take_written(size_t size, int stream)
{
  block b = take(size, stream);
  write_block(&b);
  return b;
}

void check_on(const block *b, int reader, size_t begin)
{
  if (!b->at)
    return;
  atomic_fetch_add(&p.checks, 1);
  machine_check(handle(reader), b->at, begin, b->size, b->tag, atomic_fetch_add(&p.step, 1));
}

void read_on(const block *b, int reader, unsigned delay)
{
  if (!b->at)
    return;
  machine_wait(handle(reader), handle(b->writer));
  if (delay)
    machine_delay(handle(reader), delay);
  check_on(b, reader, 0);
}

void *give(block *b)
{
  void *at = b->at;
  if (at) {
    machine_owner_end(at);
    must(esper_free(p.core, at), "free");
  }
  b->at = NULL;
  return at;
}

/* ---- marks ---------------------------------------------------------------- */

void mark(const block *b, int reader, unsigned flags)
{
  const void *at = b->at;
  size_t marks = 0;
  if (!at || p.unmarked)
    return;
  must(esper_record_use(p.core, &at, 1, p.streams[reader], flags, &marks), "record_use");
  if (marks != 1)
    found("a live block was not marked");
}

void note(const block *b, int reader)
{
  const void *at = b->at;
  if (at && !p.unmarked)
    must(esper_note_use(p.core, &at, 1, p.streams[reader]), "note_use");
}

void mark_event(const block *b, int reader, int other)
{
  const void *at = b->at;
  if (!at || p.unmarked)
    return;
  void *event = machine_event(handle(reader));
  size_t marks = 0;
  must(esper_record_use_event(p.core, &at, 1, event, 0, &marks), "record_use_event");
  if (marks != 1)
    found("a live block was not marked");
  machine_event_again(event, handle(other)); /* it is the program's own */
  machine_event_done(event);
}

void mark_until_free(const block *b, int reader)
{
  if (b->at && !p.unmarked)
    must(esper_record_stream(p.core, b->at, p.streams[reader]), "record_stream");
}

/* ---- beginning and end ---------------------------------------------------- */

void program_begin(esper_segments segments, size_t allowance, size_t bytes)
{
  esper_config config = {.allowance = allowance,
                         .segments = segments,
                         .large_segment_size = 20 * MIB}; /* of pages, too */
  true_driver = machine_begin(p.seed);
  driver = *true_driver;
  driver.event_query = query_or_refuse;
  driver.event_synchronize = synchronize_or_find;
  driver.event_wait = wait_or_find;
  driver.stream_wait = stream_wait_of_cores;
  driver.copy_to_host = copy_to_host_of_cores;
  driver.copy_to_device = copy_to_device_of_cores;
  driver.memory_zero = memory_zero_of_cores;
  must(esper_core_create(&driver, &config, &p.core), "core_create");
  for (int i = 0; i < MACHINE_STREAMS; i++)
    p.streams[i] = (esper_stream){machine_stream(i), 0, ESPER_STREAM_IMMORTAL};
  p.stream_count = MACHINE_STREAMS;
  size_t available = 0, total = 0;
  must(esper_memory_info(p.core, 0, &available, &total), "memory_info");
  /* Half a MiB more, since a fraction is no whole number of bytes. */
  if (bytes)
    must(esper_set_memory_fraction(p.core, 0, ((double)bytes + 0.5 * (double)MIB) / (double)total),
         "set_memory_fraction");
}

static void check_errors(void)
{
  if (!machine_finish())
    found("streams wait for each other for ever");
  machine_error wrong = machine_errors();
  if (wrong.count)
    found("%u words are wrong: the first, word %u read at step %u, is %08x and not %08x",
          wrong.count, wrong.word, wrong.step, wrong.seen, wrong.wanted);
}

static void check_core(void)
{
  if (!esper_core_is_valid(p.core))
    found("the core is not valid");
}

void program_check(block *blocks, int count)
{
  check_errors();
  for (int i = 0; i < count; i++)
    if (blocks[i].owner >= 0)
      check_on(&blocks[i], blocks[i].owner, 0);
  check_errors();
  check_core();
  for (int i = 0; i < count; i++)
    give(&blocks[i]);
}

void program_end(void)
{
  esper_retire(p.core, 0);
  must(esper_empty_cache(p.core, 0, NULL), "empty_cache");
  check_core();
  esper_core_destroy(p.core);
  p.core = NULL;
  machine_end();
}
