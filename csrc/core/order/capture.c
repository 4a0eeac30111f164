#include "capture.h"

#include <stdlib.h>

#include "../base/call.h"
#include "capture_thread.h"
#include "capturing.h"

enum {
  SETS = 256,   /* of remembered points, by node; a forgotten point is not known to come before */
  WAYS = 4,     /* branches at one node, or nodes of one hash */
  VISITS = 128, /* nodes that one walk looks at */
  BEFORE = 64,  /* dependencies of one node that a walk can follow */
};

typedef struct known_point {
  void *node;
  branch_t *branch;
  uint64_t number;
} known_point_t;

struct capture {
  core_t *core;
  uint64_t id;
  int references; /* under the core's captures_lock, as are the lists */
  unsigned branch_count;
  branch_t *branches;
  capture_t *next;
  unsigned turn;
  known_point_t points[SETS][WAYS]; /* by a hash of the node; newer points replace older ones */
};

/* ---- captures and branches ---------------------------------------------- */

static capture_t *capture_find(core_t *core, uint64_t id)
{
  capture_t *c = core->captures;
  while (c && c->id != id)
    c = c->next;
  return c;
}

static capture_t *capture_make(core_t *core, uint64_t id)
{
  capture_t *c = calloc(1, sizeof *c);
  if (!c)
    return NULL;
  c->core = core;
  c->id = id;
  c->next = core->captures;
  core->captures = c;
  return c;
}

static void capture_destroy(capture_t *c)
{
  capture_t **link = &c->core->captures;
  while (*link != c)
    link = &(*link)->next;
  *link = c->next;
  for (branch_t *b = c->branches, *next; b; b = next) {
    next = b->next;
    free(b);
  }
  free(c);
}

static branch_t *branch_find(capture_t *c, const stream_t *stream)
{
  branch_t *b = c->branches;
  while (b && b->stream != stream)
    b = b->next;
  return b;
}

static branch_t *branch_make(capture_t *c, stream_t *stream)
{
  branch_t *b = calloc(1, sizeof *b);
  if (!b)
    return NULL;
  b->capture = c;
  b->stream = stream;
  b->index = c->branch_count++;
  b->next = c->branches;
  c->branches = b;
  return b;
}

branch_t *capture_branch(core_t *core, stream_t *stream, uint64_t id)
{
  lock(&core->captures_lock);
  capture_t *c = capture_find(core, id);
  if (!c)
    c = capture_make(core, id);
  branch_t *b = c ? branch_find(c, stream) : NULL;
  if (c && !b)
    b = branch_make(c, stream);
  if (b)
    c->references++;
  else if (c && !c->references)
    capture_destroy(c);
  unlock(&core->captures_lock);
  return b;
}

void branch_keep(branch_t *b)
{
  mutex_t *captures_lock = &b->capture->core->captures_lock;
  lock(captures_lock);
  b->capture->references++;
  unlock(captures_lock);
}

void branch_drop(branch_t *b)
{
  mutex_t *captures_lock = &b->capture->core->captures_lock;
  lock(captures_lock);
  if (--b->capture->references == 0)
    capture_destroy(b->capture);
  unlock(captures_lock);
}

/* ---- points ---------------------------------------------------------------- */

static known_point_t *known_points_at(capture_t *c, void *node)
{
  return c->points[((uintptr_t)node >> 4) * 0x9e3779b97f4a7c15u >> 56];
}

static void point_remember(branch_t *b)
{
  capture_t *c = b->capture;
  lock(&c->core->captures_lock);
  known_points_at(c, b->node)[c->turn++ % WAYS] = (known_point_t){b->node, b, b->last};
  unlock(&c->core->captures_lock);
}

/* The nodes that the branch's next one will directly depend on. The number, or -1: unknown. */
static int tails_of(const branch_t *b, void *handle, void *tails[BEFORE])
{
  const stream_t *s = b->stream;
  size_t count = BEFORE;
  bool known = call_capture_tails(s->core, s->device->index, handle, b->capture->id, tails,
                                  &count) == ESPER_OK;
  return known ? (int)count : -1;
}

/* Makes the branch's last point that of now. *joined: its stream has waited for others and recorded
 * nothing since, so that only its next node comes after all. Adding a node for that is not the
 * allocator's to do. Under the stream's record lock, so that numbers follow the graph's order. */
static bool point_of_now(branch_t *b, void *handle, bool *joined)
{
  void *tails[BEFORE];
  int count = tails_of(b, handle, tails);
  *joined = count > 1;
  if (count < 0 || (!count && b->last))
    return false; /* without tails, the stream's dependencies were removed */
  if (count == 1 && tails[0] != b->node) {
    b->last++;
    b->node = tails[0];
    point_remember(b);
  }
  return true;
}

bool branch_point(branch_t *b, void *handle, capture_point_t *point)
{
  bool joined;
  lock(&b->stream->lock);
  bool known = point_of_now(b, handle, &joined);
  *point = (capture_point_t){known ? b : NULL, b->last + joined};
  unlock(&b->stream->lock);
  if (known)
    branch_keep(b);
  return known;
}

void capture_point_drop(capture_point_t *point)
{
  if (point->branch)
    branch_drop(point->branch);
  *point = (capture_point_t){0};
}

/* ---- the vector clock -------------------------------------------------------- */

static void raise(branch_t *b, const branch_t *of, uint64_t number)
{
  if (of->index >= BRANCHES || atomic_load(&b->vector_clock[of->index]) >= number)
    return;
  atomic_store(&b->vector_clock[of->index], number);
  atomic_fetch_add(&b->stream->core->progress, 1);
}

/* Points of other branches at the node come before the branch's future nodes. */
static void meet(branch_t *b, void *node)
{
  capture_t *c = b->capture;
  lock(&c->core->captures_lock);
  const known_point_t *known = known_points_at(c, node);
  for (int i = 0; i < WAYS; i++)
    if (known[i].node == node && known[i].branch != b)
      raise(b, known[i].branch, known[i].number);
  unlock(&c->core->captures_lock);
}

static bool is_among(void *const *nodes, int count, const void *node)
{
  for (int i = 0; i < count; i++)
    if (nodes[i] == node)
      return true;
  return false;
}

/* Breadth first from the branch's last nodes back to where the previous walk began. */
static void walk(branch_t *b, void *handle, void *const *tails, int tail_count, void *until)
{
  void *nodes[VISITS];
  int count = 0;
  stream_t *s = b->stream;
  for (int i = 0; i < tail_count; i++)
    if (tails[i] != until)
      nodes[count++] = tails[i];
  for (int i = 0; i < count; i++) {
    meet(b, nodes[i]);
    void *before[BEFORE];
    size_t found = BEFORE;
    if (call_capture_before(s->core, s->device->index, handle, b->capture->id, nodes[i], before,
                            &found) != ESPER_OK)
      continue; /* for example, the capture has just ended */
    for (size_t k = 0; k < found && count < VISITS; k++)
      if (before[k] != until && !is_among(nodes, count, before[k]))
        nodes[count++] = before[k];
  }
}

void branch_learn(branch_t *b, void *handle)
{
  void *tails[BEFORE];
  lock(&b->stream->lock);
  /* A new branch may have points at nodes that were walked over before: begin anew then. */
  lock(&b->capture->core->captures_lock);
  unsigned branches = b->capture->branch_count;
  unlock(&b->capture->core->captures_lock);
  int count = tails_of(b, handle, tails);
  bool walked = count == 1 && tails[0] == b->learned && b->seen == branches;
  if (count > 0 && !walked) {
    walk(b, handle, tails, count, b->seen == branches ? b->learned : NULL);
    if (count == 1)
      b->learned = tails[0];
    else if (b->seen != branches)
      b->learned = NULL;
    b->seen = branches;
  }
  unlock(&b->stream->lock);
}

bool branch_is_after(const branch_t *b, const capture_point_t *point)
{
  if (!point->branch || point->branch->capture != b->capture)
    return !RULE(OUTSIDE_STAYS_OUTSIDE);
  const branch_t *of = point->branch;
  return of == b || !point->number || !RULE(CAPTURED_USE_HOLDS) ||
         (of->index < BRANCHES && atomic_load(&b->vector_clock[of->index]) >= point->number);
}

/* ---- frees ----------------------------------------------------------------------- */

captured_free_t capture_of_free(core_t *core, uint64_t capture, stream_t *stream)
{
  if (!stream->immortal)
    return FREED_UNKNOWN;
  if (RULE(BODY_KEEPS_APART) && capture_thread_may_be_elsewhere(core, capture))
    return FREED_OUTSIDE;
  presented_t presented = {.stream = stream, .handle = stream->handle};
  return stream_capture_of(presented, true) == capture ? FREED_INSIDE : FREED_OUTSIDE;
}

/* ---- checking ---------------------------------------------------------------------- */

bool capture_is_valid(core_t *core)
{
  bool valid = true;
  lock(&core->captures_lock);
  for (const capture_t *c = core->captures; c && valid; c = c->next) {
    unsigned branches = 0;
    for (const branch_t *b = c->branches; b; b = b->next, branches++)
      valid &= b->capture == c && b->index < c->branch_count;
    valid &= c->references > 0 && branches == c->branch_count;
  }
  unlock(&core->captures_lock);
  return valid;
}
