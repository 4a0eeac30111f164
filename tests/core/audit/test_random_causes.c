/* Random programs that lack waits. They run again and again, each time with one more of the waits
 * that the engine says are missing: that takes away all findings of its cause, and not the next
 * cause. ESPER_AUDIT_PROGRAMS is how many (2,000). */
#include "audit/audit.h"

#include "check.h"
#include "draw.h"

enum { STREAMS = 4, BLOCKS = 6, EVENTS = 3, STEPS = 60, MOST = 2 * STEPS, SIZE = 512 };

/* A wait of `stream` for all that `other` has, before the step. */
typedef struct wait {
  unsigned step;
  audit_stream stream, other;
} wait;

static audit_finding found[MOST], again[MOST];
static uint64_t program;

static audit_stream name_of(uint64_t stream)
{
  return (audit_stream){0, stream + 1};
}

/* Everything is done at a line of its own, the step. */
static void one_step(audit *a, uint64_t *random, unsigned step, int *live)
{
  const uint64_t what = draw_below(random, 10), block = draw_below(random, BLOCKS);
  const uint64_t stream = draw_below(random, STREAMS), event = draw_below(random, EVENTS) + 1;
  const uintptr_t address = (block + 1) * 0x1000;
  const audit_stream name = name_of(stream);
  if (what < 2)
    audit_record(a, event, name);
  else if (what < 4)
    audit_wait(a, name, event);
  else if (!live[block])
    audit_allocated(a, address, SIZE, &name, step);
  else if (what == 9)
    audit_freed(a, address, step);
  else {
    const audit_access access = {.address = address,
                                 .bytes = {address, SIZE, 0, 0},
                                 .stream = name,
                                 .writes = what < 7,
                                 .place = {step, 0, 0}};
    audit_accessed(a, &access);
  }
  if (what >= 4)
    live[block] = what != 9 || !live[block];
}

static size_t run(const wait *extra, size_t extra_count, audit_finding *findings)
{
  audit *a = audit_create();
  uint64_t random = program;
  int live[BLOCKS] = {0};
  CHECK(a);
  for (unsigned step = 1; step <= STEPS + 1; step++) {
    for (size_t i = 0; i < extra_count; i++)
      if (extra[i].step == step) {
        audit_record(a, 99, extra[i].other);
        audit_wait(a, extra[i].stream, 99);
      }
    if (step <= STEPS)
      one_step(a, &random, step, live);
  }
  audit_judge_rest(a);
  const size_t count = audit_finding_count(a);
  CHECK(count <= MOST && audit_is_complete(a));
  for (size_t i = 0; i < count; i++)
    findings[i] = *audit_finding_at(a, i);
  audit_destroy(a);
  return count;
}

static int is_free(const audit_finding *f)
{
  return f->kind == AUDIT_FREED_IN_USE || f->kind == AUDIT_MARKED_EARLY;
}

static int is_same(const audit_finding *f, const audit_finding *g)
{
  return f->kind == g->kind && f->earlier.place.site == g->earlier.place.site &&
         f->freed == g->freed && f->later.place.site == g->later.place.site;
}

/* Of several uses that an access is not ordered after, one is named. */
static int is_alike(const audit_finding *f, const audit_finding *g)
{
  return !is_free(g) && f->later.place.site == g->later.place.site;
}

static int is_among(const audit_finding *f, size_t count,
                    int (*compare)(const audit_finding *, const audit_finding *))
{
  for (size_t i = 0; i < count; i++)
    if (compare(f, &again[i]))
      return 1;
  return 0;
}

static wait wait_that_lacks(const audit_finding *f)
{
  if (f->has_later)
    return (wait){f->later.place.site, f->later.stream, f->earlier.stream};
  return (wait){STEPS + 1, f->home, f->earlier.stream};
}

TEST(each_wait_that_is_missing_mends_its_findings_and_not_the_next_cause)
{
  const char *text = getenv("ESPER_AUDIT_PROGRAMS");
  const uint64_t programs = text ? strtoull(text, NULL, 10) : 2000;
  unsigned causes = 0, all = 0;
  for (program = 1; program <= programs; program++) {
    const size_t count = run(NULL, 0, found);
    wait missing[MOST];
    size_t waits = 0, left = count;
    memcpy(again, found, sizeof again);
    for (size_t cause = 0; cause < count; cause++) {
      if (found[cause].cause != cause)
        continue;
      /* A free need not name a use that another one comes after by now. */
      if (!is_free(&found[cause]) && !is_among(&found[cause], left, is_alike))
        check_failed(__FILE__, __LINE__, "program %llu: the causes before %zu explain it",
                     (unsigned long long)program, cause);
      missing[waits++] = wait_that_lacks(&found[cause]);
      left = run(missing, waits, again);
      for (size_t i = 0; i < count; i++)
        if (found[i].cause == cause && is_among(&found[i], left, is_same))
          check_failed(__FILE__, __LINE__, "program %llu: finding %zu is not of cause %zu",
                       (unsigned long long)program, i, cause);
    }
    causes += (unsigned)waits;
    all += (unsigned)count;
  }
  printf("  %u findings of %u causes\n", all, causes);
  CHECK(causes > programs && all > causes + causes / 4);
}
