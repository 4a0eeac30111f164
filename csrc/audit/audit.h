/* audit.h: a happens-before engine. It is told what a program enqueues, in the order of its calls,
 * and finds accesses to memory that nothing orders.
 *
 * Ordered means: by a stream's queue, by events that streams wait for, or because the host waited
 * before it enqueued what follows. All threads count as one host: what hands work from one thread
 * to another is not seen, so a wait of one thread orders what any thread enqueues afterwards.
 *
 * Names of streams, events and graphs are the caller's; 0 is a stream like any other. Sites,
 * operators and tensors are numbers whose meaning only the caller knows; 0 means unknown.
 *
 * The caller takes care that one thread calls at a time. Calls cannot fail: without host memory an
 * observation is lost, and audit_is_complete() says so. */
#ifndef ESPER_AUDIT_H
#define ESPER_AUDIT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct audit audit;

/* Which bytes an access touches: [begin, begin + size), all of them if `period` is 0. Otherwise
 * only those whose distance from `begin` modulo `period` is less than `run`. */
typedef struct audit_footprint {
  uintptr_t begin;
  size_t size, period, run;
} audit_footprint;

typedef struct audit_stream {
  int device;
  uint64_t handle;
} audit_stream;

/* What did something, in the caller's numbers. */
typedef struct audit_place {
  uint32_t site;      /* where in the program */
  uint32_t operation; /* which operation */
  uint32_t tensor;    /* of what shape */
} audit_place;

typedef enum audit_kind {
  AUDIT_FREED_IN_USE,    /* freed, and another stream's access is neither ordered nor marked */
  AUDIT_MARKED_EARLY,    /* the same, but an earlier access of that stream was marked */
  AUDIT_READ_EARLY,      /* a read that is not ordered after a write */
  AUDIT_WRITE_EARLY,     /* a write that is not ordered after a read or a write */
  AUDIT_STALE_OUTPUT,    /* a view of a graph's output, read when a later one like it was made */
  AUDIT_USED_AFTER_FREE, /* memory that is accessed after it was freed: see audit_report() */
  AUDIT_KINDS
} audit_kind;

/* One of the two accesses that nothing orders. */
typedef struct audit_point {
  audit_place place;
  audit_stream stream;
  int writes;
  int is_allocation; /* the stream allocated the memory there; its earlier work may still use it */
} audit_point;

typedef struct audit_finding {
  audit_kind kind;
  uint64_t count; /* how often; all else is of the first time */
  uintptr_t address;
  size_t size;        /* bytes of the block, as far as they are known */
  uint32_t allocated; /* the site */
  int home_is_known;
  audit_stream home; /* which stream it was allocated on */
  audit_point earlier;
  /* What is not ordered after it. Of a freed block: the first access to memory that was allocated
   * on its stream since, or all zero if there was none. */
  audit_point later;
  int has_later;
  uint32_t freed, marked; /* the sites; 0: it was not */
  /* The finding (its index) whose missing wait, just before its `later`, would have ordered this
   * one the first time; its own index if there was none. `stands_alone`: at least once only a wait
   * of its own would have helped. */
  size_t cause;
  int stands_alone;
} audit_finding;

/* NULL: no host memory. */
audit *audit_create(void);
void audit_destroy(audit *a);
/* 0: host memory ran out, and something is missing. */
int audit_is_complete(const audit *a);

/* Order. A wait for an event that was never recorded orders nothing. A record counts from the time
 * of its call: synchronising with the event orders what was enqueued until then. */
void audit_record(audit *a, uint64_t event, audit_stream stream);
void audit_wait(audit *a, audit_stream stream, uint64_t event);
void audit_event_destroyed(audit *a, uint64_t event);
void audit_event_synchronized(audit *a, uint64_t event);
void audit_stream_synchronized(audit *a, audit_stream stream);
void audit_device_synchronized(audit *a, int device);

/* Memory. A block that is live when the audit begins counts as allocated then; with `stream` NULL
 * its stream is unknown, and its free is not judged. `size` may be 0, if nobody knows it. */
void audit_allocated(audit *a, uintptr_t address, size_t size, const audit_stream *stream,
                     uint32_t site);
void audit_freed(audit *a, uintptr_t address, uint32_t site);

typedef struct audit_access {
  uintptr_t address; /* of the block */
  size_t size;       /* of the block; 0: unknown */
  audit_footprint bytes;
  audit_stream stream;
  int writes;
  audit_place place;
  /* Of a view, if not 0: audit_generation() when it was handed out, and what it is like. */
  uint64_t born, like;
} audit_access;

void audit_accessed(audit *a, const audit_access *access);

/* A mark of `stream` protects what comes before it, and with `until_free` what comes before the
 * free. audit_marked_by_event protects what comes before the event. After audit_held the free is
 * never judged: the memory is safe, whoever uses it. */
void audit_marked(audit *a, uintptr_t address, audit_stream stream, int until_free, uint32_t site);
void audit_marked_by_event(audit *a, uintptr_t address, uint64_t event, uint32_t site);
void audit_held(audit *a, uintptr_t address);

/* Graphs. A stream that waits for an event of a capture joins it. What is captured is judged inside
 * the capture, and outside it at each replay. audit_capture_ended with graph 0 discards it. */
void audit_capture_began(audit *a, audit_stream stream);
void audit_capture_ended(audit *a, audit_stream stream, uint64_t graph);
void audit_replayed(audit *a, uint64_t graph, audit_stream stream, audit_place place);
void audit_graph_destroyed(audit *a, uint64_t graph);
/* How often the graph that the block belongs to was replayed; 0: never, or it belongs to none. */
uint64_t audit_generation(const audit *a, uintptr_t address);
/* A view of a graph's output was made. It is for the newest replay, and takes the place of earlier
 * views that are like it, which are stale from then on. */
void audit_handed_out(audit *a, uintptr_t address, uint64_t like);

/* Of the block that was freed last: a use that nothing orders before what its stream does next, and
 * that nothing protects, as a finding without `later`. NULL: there is none. A wait after the free
 * may still make it harmless. */
const audit_finding *audit_last_free(const audit *a);

/* Judges the frees that nothing has followed yet. */
void audit_judge_rest(audit *a);

/* Adds what somebody else has found. */
void audit_report(audit *a, const audit_finding *finding);

size_t audit_finding_count(const audit *a);
const audit_finding *audit_finding_at(const audit *a, size_t index);

/* Bytes of host memory that the engine has. */
size_t audit_memory(const audit *a);

#ifdef __cplusplus
}
#endif
#endif
