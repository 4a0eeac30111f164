/* replay.c: runs a recorded history through a new core.
 *
 * It runs twice, on a new core each time: first with a trace, which is read and added up after
 * every operation, then without, to measure the time. Runs too short to measure are repeated.
 *
 * A free may be pending: another stream uses the memory until a later operation ends that use. For
 * such uses there are streams that are stalled until then (replay/stalled_driver.h). All other
 * work counts as done at once, because a recording does not tell how far the GPU was. A core
 * may find out later than the recording that a free has completed (of memory lent between streams).
 * There the replay makes the core look, at the same operation in every run. */
#define PY_SSIZE_T_CLEAN
#include "replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../device/sim/sim.h"
#include "../esper_alloc.h"
#include "../replay/history.h"
#include "../replay/stalled_driver.h"

typedef struct usage {
  int64_t allocated, active, reserved; /* bytes */
} usage;

/* One core over one driver, and the objects that the history names. */
typedef struct stage {
  sim *simulation; /* NULL on CUDA */
  stalled_driver *driver;
  esper_core *core;
  esper_stream *streams; /* the history's, then those of uses */
  size_t streams_made;
  esper_pool **pools;
  void **slots;
  uint64_t *stalls;    /* of slots whose free is pending */
  unsigned char *late; /* operations after which the core must look; shared */
  char failure[512];   /* the first failure; empty: none */
  esper_status status;
  size_t failed_at; /* the operation, or SIZE_MAX */
} stage;

typedef struct result {
  double nanoseconds; /* time of one run's operations */
  size_t operations;  /* number of timed operations */
  uint64_t *calls;    /* calls of each function by the operations */
  size_t call_count;
  usage peak;
  int64_t segments;    /* the highest number */
  usage *curve;        /* after each operation */
  unsigned char *late; /* see stage */
} result;

enum { RUNS_AT_LEAST = 3, RUNS_AT_MOST = 25, ENOUGH_NANOSECONDS = 20 * 1000 * 1000 };

static int64_t read_clock(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* ---- the stage ---------------------------------------------------------- */

static int fail(stage *s, size_t at, esper_status status, const char *doing)
{
  if (s->failure[0])
    return 0;
  s->status = status;
  s->failed_at = at;
  snprintf(s->failure, sizeof s->failure, "%s: %s", doing,
           status == ESPER_HOST_MEMORY ? "no host memory" : esper_last_error());
  return 0;
}

static void hear_simulation(void *context, const char *report)
{
  stage *s = context;
  if (s->failure[0])
    return;
  s->status = ESPER_INVALID;
  s->failed_at = SIZE_MAX;
  snprintf(s->failure, sizeof s->failure, "the simulated device: %s", report);
}

static int open_driver(stage *s, const history *h)
{
  const esper_driver *driver = NULL;
  if (h->on_cuda) {
    esper_status status = esper_cuda_driver(&driver);
    if (status != ESPER_OK)
      return fail(s, SIZE_MAX, status, "the CUDA driver");
  } else {
    /* By default practically unlimited, because recordings leave out requests that failed. */
    size_t capacity = h->total ? h->total : (size_t)1 << 46;
    sim_options options = {.capacity = capacity, .virtual_memory = 1};
    s->simulation = sim_create(&options);
    if (!s->simulation)
      return fail(s, SIZE_MAX, ESPER_HOST_MEMORY, "the simulated device");
    sim_on_failure(s->simulation, hear_simulation, s);
    driver = sim_driver(s->simulation);
  }
  s->driver = stalled_driver_create(driver);
  return s->driver || fail(s, SIZE_MAX, ESPER_HOST_MEMORY, "the driver");
}

static int make_streams(stage *s, const history *h)
{
  const esper_driver *driver = stalled_driver_functions(s->driver);
  for (size_t i = 0; i < h->streams + h->uses; i++) {
    void *handle = NULL;
    esper_status status = driver->stream_create(driver->self, 0, &handle);
    if (status != ESPER_OK) {
      snprintf(s->failure, sizeof s->failure, "making a stream: %s",
               driver->last_error(driver->self));
      s->status = status;
      return 0;
    }
    s->streams[s->streams_made++] = (esper_stream){handle, 0, ESPER_STREAM_IMMORTAL};
  }
  return 1;
}

static int make_pools(stage *s, const history *h)
{
  for (size_t i = 0; i < h->pools; i++) {
    const uint64_t *id = h->pool_ids[i];
    if (id[0] == 0 && id[1] == 0)
      continue; /* NULL: the default pool */
    esper_status status = esper_pool_create(s->core, 0, id[0], id[1], &s->pools[i]);
    if (status != ESPER_OK)
      return fail(s, SIZE_MAX, status, "making a pool");
  }
  return 1;
}

/* What others have, and what the memory fraction allows. */
static int set_limits(stage *s, const history *h)
{
  uintptr_t address;
  const esper_driver *driver = stalled_driver_functions(s->driver);
  if (h->taken && driver->memory_alloc(driver->self, 0, h->taken, &address) != ESPER_OK)
    return fail(s, SIZE_MAX, ESPER_INVALID, "others have more than all");
  if (h->limit && h->limit < h->total)
    esper_set_memory_fraction(s->core, 0, ((double)h->limit + 1) / (double)h->total);
  return 1;
}

static int stage_open(stage *s, const history *h, unsigned char *late)
{
  memset(s, 0, sizeof *s);
  s->late = late;
  s->failed_at = SIZE_MAX;
  s->streams = calloc(h->streams + h->uses + 1, sizeof *s->streams);
  s->pools = calloc(h->pools + 1, sizeof(esper_pool *));
  s->slots = calloc(h->slots + 1, sizeof *s->slots);
  s->stalls = calloc(h->slots + 1, sizeof *s->stalls);
  if (!s->streams || !s->pools || !s->slots || !s->stalls)
    return fail(s, SIZE_MAX, ESPER_HOST_MEMORY, "replay");
  if (!open_driver(s, h))
    return 0;
  esper_config config = {.allowance = h->allowance, .segments = h->segments};
  esper_status status = esper_core_create(stalled_driver_functions(s->driver), &config, &s->core);
  if (status != ESPER_OK)
    return fail(s, SIZE_MAX, status, "making a core");
  return make_streams(s, h) && make_pools(s, h) && set_limits(s, h);
}

static void stage_close(stage *s)
{
  if (s->core)
    esper_core_destroy(s->core);
  if (s->driver) {
    const esper_driver *driver = stalled_driver_functions(s->driver);
    for (size_t i = 0; i < s->streams_made; i++)
      driver->stream_destroy(driver->self, 0, s->streams[i].handle);
  }
  stalled_driver_destroy(s->driver);
  if (s->simulation)
    sim_destroy(s->simulation);
  free(s->streams);
  free(s->pools);
  free(s->slots);
  free(s->stalls);
}

/* ---- the operations ----------------------------------------------------- */

/* As PyTorch drops one. */
static esper_status drop_pool(stage *s, const uint64_t *id)
{
  esper_status status = esper_pool_release(s->core, 0, id[0], id[1]);
  return status == ESPER_OK ? esper_pool_empty(s->core, 0, id[0], id[1]) : status;
}

static esper_status run_operation(stage *s, const history *h, const operation *op)
{
  const esper_stream *unnamed = s->streams + h->streams;
  esper_status status;
  switch ((operation_kind)op->kind) {
  case OPERATION_ALLOC:
    return s->pools[op->pool]
               ? esper_malloc_from(s->core, s->pools[op->pool], op->size, s->streams[op->stream],
                                   &s->slots[op->slot])
               : esper_malloc(s->core, op->size, s->streams[op->stream], &s->slots[op->slot]);
  case OPERATION_FREE: return esper_free(s->core, s->slots[op->slot]);
  case OPERATION_FREE_PENDING:
    s->stalls[op->slot] = stalled_driver_stall(s->driver, unnamed[op->stream].handle);
    if (!s->stalls[op->slot])
      return ESPER_HOST_MEMORY;
    status = esper_record_stream(s->core, s->slots[op->slot], unnamed[op->stream]);
    return status == ESPER_OK ? esper_free(s->core, s->slots[op->slot]) : status;
  case OPERATION_DONE:
    stalled_driver_release(s->driver, unnamed[op->stream].handle, s->stalls[op->slot]);
    return ESPER_OK;
  case OPERATION_RELEASE: return drop_pool(s, h->pool_ids[op->pool]);
  case OPERATION_EMPTY: return esper_empty_cache(s->core, 0, NULL);
  case OPERATION_KINDS: break;
  }
  return ESPER_INVALID;
}

/* Lets Python handle signals, Ctrl-C among them. Stops the replay if a handler raised. */
static int handle_signals(stage *s, size_t at)
{
  PyGILState_STATE gil = PyGILState_Ensure();
  int raised = PyErr_CheckSignals() < 0;
  PyGILState_Release(gil);
  return !raised || fail(s, at, ESPER_INVALID, "interrupted");
}

static int run_operations(stage *s, const history *h, size_t first, size_t end)
{
  enum { BETWEEN_SIGNALS = 4096 };
  for (size_t i = first; i < end; i++) {
    if (i % BETWEEN_SIGNALS == 0 && !handle_signals(s, i))
      return 0;
    esper_status status = run_operation(s, h, &h->operations[i]);
    if (status != ESPER_OK)
      return fail(s, i, status, h->operations[i].kind == OPERATION_ALLOC ? "malloc" : "free");
    if (s->late[i])
      esper_retire(s->core, 0);
  }
  return !s->failure[0];
}

/* Replaces each number in `calls` by the driver's calls so far minus that number. */
static void count_calls(const stage *s, result *r)
{
  for (size_t i = 0; i < r->call_count; i++)
    r->calls[i] = esper_driver_calls(s->core, (int)i) - r->calls[i];
}

/* Measures the operations, taking the fastest of several runs, because only the machine slows one
 * down. On CUDA there is one run, because obtaining memory is real work there. */
static int run_timed(stage *s, const history *h, result *r)
{
  int64_t total = 0;
  for (int runs = 0; runs < RUNS_AT_MOST; runs++) {
    if (runs > 0) {
      if (h->on_cuda || (runs >= RUNS_AT_LEAST && total >= ENOUGH_NANOSECONDS))
        break;
      stage_close(s);
    }
    if (!stage_open(s, h, r->late) || !run_operations(s, h, 0, h->start))
      return 0;
    memset(r->calls, 0, r->call_count * sizeof *r->calls);
    count_calls(s, r);
    int64_t begin = read_clock();
    if (!run_operations(s, h, h->start, h->count))
      return 0;
    int64_t span = read_clock() - begin;
    count_calls(s, r);
    if (runs == 0 || (double)span < r->nanoseconds)
      r->nanoseconds = (double)span;
    total += span;
  }
  return 1;
}

/* ---- the trace ---------------------------------------------------------- */

/* Rounds a size as it is rounded when the recording is added up. */
static int64_t round_size(uint64_t size)
{
  return (int64_t)((size + 511) & ~UINT64_C(511));
}

static void raise_peak(int64_t *peak, int64_t value)
{
  if (value > *peak)
    *peak = value;
}

static void add_entry(usage *now, usage *peak, const esper_trace_entry *entry)
{
  int64_t size = round_size(entry->size);
  switch (entry->action) {
  case ESPER_TRACE_ALLOC:
    now->allocated += size;
    now->active += size;
    break;
  case ESPER_TRACE_FREE_REQUESTED: now->allocated -= size; break;
  case ESPER_TRACE_FREE_COMPLETED: now->active -= size; break;
  case ESPER_TRACE_SEGMENT_ALLOC:
  case ESPER_TRACE_SEGMENT_MAP: now->reserved += (int64_t)entry->size; break;
  case ESPER_TRACE_SEGMENT_FREE:
  case ESPER_TRACE_SEGMENT_UNMAP: now->reserved -= (int64_t)entry->size; break;
  default: break; /* no memory comes or goes */
  }
  raise_peak(&peak->allocated, now->allocated);
  raise_peak(&peak->active, now->active);
}

/* What the core tells of is added up here. */
typedef struct tally {
  usage now, peak;
  size_t completed; /* frees, since this was last set to 0 */
} tally;

static void hear_core(void *context, const esper_trace_entry *entry)
{
  tally *t = context;
  add_entry(&t->now, &t->peak, entry);
  t->completed += entry->action == ESPER_TRACE_FREE_COMPLETED;
}

/* Makes the core look for the free that completes here. On CUDA even an idle stream's event takes
 * some microseconds. */
static void complete_late(stage *s, const history *h, size_t at, const tally *t)
{
  enum { PATIENCE_NANOSECONDS = 10 * 1000 * 1000 };
  int64_t begin = read_clock();
  s->late[at] = 1;
  do
    esper_retire(s->core, 0);
  while (!t->completed && h->on_cuda && read_clock() - begin < PATIENCE_NANOSECONDS);
}

static int run_one_traced(stage *s, const history *h, size_t at, tally *t)
{
  uint32_t kind = h->operations[at].kind;
  /* It looks at all that is pending: once for uses that end in a row. */
  int more = at + 1 < h->count && h->operations[at + 1].kind == OPERATION_DONE;
  t->completed = 0;
  if (!run_operations(s, h, at, at + 1))
    return 0;
  if (!t->completed && (kind == OPERATION_FREE || (kind == OPERATION_DONE && !more)))
    complete_late(s, h, at, t);
  return 1;
}

static int run_all_traced(stage *s, const history *h, result *r, tally *t)
{
  for (size_t i = 0; i < h->start; i++)
    if (!run_one_traced(s, h, i, t))
      return 0;
  t->peak = t->now;
  esper_reset_peak_stats(s->core, 0);
  for (size_t i = h->start; i < h->count; i++) {
    if (!run_one_traced(s, h, i, t))
      return 0;
    r->curve[i - h->start] = t->now;
  }
  return 1;
}

static int run_traced(stage *s, const history *h, result *r)
{
  if (!stage_open(s, h, r->late))
    return 0;
  tally t = {0};
  esper_trace_watch(s->core, hear_core, &t);
  int done = run_all_traced(s, h, r, &t);
  esper_trace_watch(s->core, NULL, NULL);
  if (!done)
    return 0;
  r->peak = t.peak;
  esper_stats stats;
  esper_status status = esper_get_stats(s->core, 0, &stats);
  if (status != ESPER_OK)
    return fail(s, SIZE_MAX, status, "statistics");
  r->peak.reserved = stats.reserved_bytes[ESPER_ALL].peak;
  r->segments = stats.segment[ESPER_ALL].peak;
  return 1;
}

/* ---- Python ------------------------------------------------------------- */

static int read_pool_ids(history *h, PyObject *pools)
{
  PyObject *items = PySequence_Fast(pools, "pools must be a sequence of pairs");
  if (!items)
    return 0;
  h->pools = (size_t)PySequence_Fast_GET_SIZE(items);
  h->pool_ids = calloc(h->pools + 1, sizeof *h->pool_ids);
  int fine = h->pool_ids != NULL;
  if (!fine)
    PyErr_NoMemory();
  for (size_t i = 0; i < h->pools && fine; i++) {
    unsigned long long first, second;
    PyObject *pair = PySequence_Fast_GET_ITEM(items, (Py_ssize_t)i);
    fine = PyTuple_Check(pair) && PyArg_ParseTuple(pair, "KK", &first, &second);
    if (fine) {
      h->pool_ids[i][0] = first;
      h->pool_ids[i][1] = second;
    } else if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_TypeError, "pools must be pairs of numbers");
    }
  }
  Py_DECREF(items);
  return fine;
}

static PyObject *build_calls(const result *r)
{
  PyObject *calls = PyDict_New();
  for (size_t i = 0; i < r->call_count && calls; i++) {
    if (r->calls[i] == 0)
      continue;
    PyObject *count = PyLong_FromUnsignedLongLong(r->calls[i]);
    if (!count || PyDict_SetItemString(calls, esper_driver_call_name((int)i), count) < 0)
      Py_CLEAR(calls);
    Py_XDECREF(count);
  }
  return calls;
}

static PyObject *build_result(const history *h, const result *r)
{
  PyObject *calls = build_calls(r);
  if (!calls)
    return NULL;
  return Py_BuildValue("{s:n,s:d,s:N,s:L,s:L,s:L,s:L,s:y#}", "operations",
                       (Py_ssize_t)r->operations, "nanoseconds", r->nanoseconds, "device_calls",
                       calls, "peak_allocated", (long long)r->peak.allocated, "peak_active",
                       (long long)r->peak.active, "peak_reserved", (long long)r->peak.reserved,
                       "segments", (long long)r->segments, "curve", (const char *)r->curve,
                       (Py_ssize_t)((h->count - h->start) * sizeof *r->curve));
}

/* RuntimeError(message, status name, operation or None), or what a signal's handler raised */
static PyObject *raise_failure(const stage *s)
{
  if (PyErr_Occurred())
    return NULL;
  PyObject *at = s->failed_at == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(s->failed_at);
  PyObject *arguments =
      at ? Py_BuildValue("(ssN)", s->failure, esper_status_name(s->status), at) : NULL;
  if (arguments)
    PyErr_SetObject(PyExc_RuntimeError, arguments);
  Py_XDECREF(arguments);
  return NULL;
}

static PyObject *run(const history *h)
{
  stage s = {0};
  result r = {0};
  while (esper_driver_call_name((int)r.call_count))
    r.call_count++;
  r.calls = calloc(r.call_count + 1, sizeof *r.calls);
  r.curve = calloc(h->count - h->start + 1, sizeof *r.curve);
  for (size_t i = h->start; i < h->count; i++)
    r.operations += h->operations[i].kind < OPERATION_DONE;

  PyObject *answer = NULL;
  int done = 0;
  r.late = calloc(h->count + 1, 1);
  if (!r.calls || !r.curve || !r.late) {
    PyErr_NoMemory();
  } else {
    Py_BEGIN_ALLOW_THREADS done = run_traced(&s, h, &r);
    if (done && h->timed) {
      stage_close(&s);
      done = run_timed(&s, h, &r);
    }
    stage_close(&s);
    Py_END_ALLOW_THREADS answer = done ? build_result(h, &r) : raise_failure(&s);
  }
  free(r.calls);
  free(r.curve);
  free(r.late);
  return answer;
}

const char esper_py_replay_doc[] =
    "replay(operations, *, start, slots, streams, uses, pools, segments, device,\n"
    "total=0, taken=0, limit=0, allowance=-1, timed=True)\n"
    "--\n\n"
    "Runs a history through a fresh core and returns a dict: operations,\n"
    "nanoseconds (for all together), device_calls, peak_allocated,\n"
    "peak_active, peak_reserved (bytes), segments (the largest number), and curve:\n"
    "bytes of three int64 (allocated, active, reserved) after each operation.\n\n"
    "operations: packed \"=IIIIQ\" each: kind (0 alloc, 1 free, 2 free while used,\n"
    "3 that use ends, 4 the pool is dropped, 5 the cache is emptied), slot, stream\n"
    "or use, pool, bytes. The first `start` ones build the state at the start and\n"
    "are not counted. slots, streams, uses: how many there are. pools: their ids,\n"
    "pairs of numbers. segments: \"auto\", \"classic\" or \"mapped\". device: \"sim\" or\n"
    "\"cuda\". total: bytes of the simulated device; 0: practically unlimited.\n"
    "taken: bytes of it that others have. limit: bytes that may be reserved; 0: no\n"
    "limit. allowance: bytes; -1: the host is never held back. timed: if not,\n"
    "nanoseconds is 0.\n\n"
    "Raises ValueError for impossible operations, and RuntimeError\n"
    "(message, status, index of the operation or None) if one failed. Signals are\n"
    "handled while it runs; what a handler raises ends it.";

PyObject *esper_py_replay(PyObject *self, PyObject *args, PyObject *kwargs)
{
  (void)self;
  static char *names[] = {"operations", "start",     "slots",  "streams", "uses",
                          "pools",      "segments",  "device", "total",   "taken",
                          "limit",      "allowance", "timed",  NULL};
  Py_buffer view;
  Py_ssize_t start, slots, streams, uses;
  PyObject *pools;
  const char *segments, *device;
  Py_ssize_t total = 0, taken = 0, limit = 0, allowance = -1;
  int timed = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*nnnnOss|nnnnp:replay", names, &view, &start,
                                   &slots, &streams, &uses, &pools, &segments, &device, &total,
                                   &taken, &limit, &allowance, &timed))
    return NULL;

  PyObject *answer = NULL;
  history h = {.operations = view.buf,
               .count = (size_t)view.len / sizeof(operation),
               .start = (size_t)start,
               .slots = (size_t)slots,
               .streams = (size_t)streams,
               .uses = (size_t)uses,
               .segments = !strcmp(segments, "mapped")    ? ESPER_SEGMENTS_MAPPED
                           : !strcmp(segments, "classic") ? ESPER_SEGMENTS_CLASSIC
                                                          : ESPER_SEGMENTS_AUTO,
               .on_cuda = !strcmp(device, "cuda"),
               .total = (size_t)total,
               .taken = (size_t)taken,
               .limit = (size_t)limit,
               .allowance = allowance < 0 ? ESPER_ALLOWANCE_OFF : (size_t)allowance,
               .timed = timed};
  size_t at = 0;
  const char *fault = NULL;
  if (total < 0 || taken < 0 || limit < 0 || taken > total || allowance < -1)
    PyErr_SetString(PyExc_ValueError,
                    "replay: total, taken, limit or allowance is negative or too large");
  else if ((size_t)view.len % sizeof(operation) || start < 0 || h.start > h.count || slots < 0 ||
           streams < 0 || uses < 0 || slots > UINT32_MAX || streams > UINT32_MAX ||
           uses > UINT32_MAX)
    PyErr_SetString(PyExc_ValueError,
                    "replay: start, slots, streams or uses is negative or too large");
  else if (strcmp(segments, "classic") && strcmp(segments, "mapped") && strcmp(segments, "auto"))
    PyErr_Format(PyExc_ValueError,
                 "replay: segments must be 'classic', 'mapped' or 'auto', not '%s'", segments);
  else if (strcmp(device, "sim") && strcmp(device, "cuda"))
    PyErr_Format(PyExc_ValueError, "replay: device must be 'sim' or 'cuda', not '%s'", device);
  else if (!read_pool_ids(&h, pools))
    ;
  else if ((fault = history_find_fault(&h, &at)))
    PyErr_Format(PyExc_ValueError, "replay: operation %zu: %s", at, fault);
  else
    answer = run(&h);
  free(h.pool_ids);
  PyBuffer_Release(&view);
  return answer;
}
