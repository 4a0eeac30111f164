/* machine.c: does to the shadows what the loader does to the values. */
#include "machine.h"

#include <stdlib.h>

/* A value on the stack or in the memo is one of these, or CONTAINER plus the number of its
 * shadow. */
enum { ABSENT = 0, SCALAR = 1, CONTAINER = 2 };

enum { TUPLE, LIST, DICT };

static void *row_extend(row *r, size_t width)
{
  if (r->count == r->capacity) {
    size_t capacity = r->capacity ? 2 * r->capacity : 64;
    if (capacity > SIZE_MAX / width)
      return NULL;
    void *items = realloc(r->items, capacity * width);
    if (!items)
      return NULL;
    r->items = items;
    r->capacity = capacity;
  }
  return (char *)r->items + width * r->count++;
}

static outcome row_push(row *r, size_t number)
{
  size_t *item = row_extend(r, sizeof *item);
  if (!item)
    return NO_MEMORY;
  *item = number;
  return DONE;
}

static size_t *row_numbers(const row *r)
{
  return r->items;
}

static shadow *shadow_of(const machine *m, size_t value)
{
  return value < CONTAINER ? NULL : (shadow *)m->shadows.items + (value - CONTAINER);
}

/* The lowest height that the stack may have: that at the last mark. */
static size_t machine_floor(const machine *m)
{
  return m->marks.count ? row_numbers(&m->marks)[m->marks.count - 1] : 0;
}

/* The number of values above the last mark. */
static size_t machine_above(const machine *m)
{
  return m->stack.count - machine_floor(m);
}

/* Removes the last mark; *start becomes the height of the stack there. */
static bool mark_take(machine *m, size_t *start)
{
  if (m->marks.count == 0)
    return false;
  *start = machine_floor(m);
  m->marks.count--;
  return true;
}

static size_t key_size(const machine *m, size_t value)
{
  const shadow *s = shadow_of(m, value);
  return s && s->kind == TUPLE ? s->size : 1;
}

/* Puts the values from `start` on into the container. */
static outcome machine_fill(machine *m, shadow *into, size_t start)
{
  size_t size = into->size;
  for (size_t i = start; i < m->stack.count; i++) {
    size_t value = row_numbers(&m->stack)[i];
    shadow *item = shadow_of(m, value);
    if (item == into)
      return CIRCULAR;
    if (item) {
      if (item->depth >= PICKLE_DEPTH_LIMIT)
        return TOO_DEEP;
      if (item->depth >= into->depth)
        into->depth = item->depth + 1;
      item->held = true;
    }
    size += key_size(m, value);
    if (size > PICKLE_KEY_LIMIT)
      size = PICKLE_KEY_LIMIT + 1;
  }
  into->size = (unsigned short)size;
  return DONE;
}

/* Checks the keys, which are every second value from `start` on. */
static outcome machine_check_pairs(const machine *m, size_t start)
{
  if ((m->stack.count - start) % 2 != 0)
    return NOT_POSSIBLE;
  for (size_t i = start; i < m->stack.count; i += 2) {
    if (key_size(m, row_numbers(&m->stack)[i]) > PICKLE_KEY_LIMIT)
      return HUGE_KEY;
  }
  return DONE;
}

/* Replaces the values from `start` on by a container of them. */
static outcome machine_make(machine *m, unsigned char kind, size_t start)
{
  outcome done = kind == DICT ? machine_check_pairs(m, start) : DONE;
  if (done != DONE)
    return done;
  size_t number = m->shadows.count;
  shadow *made = row_extend(&m->shadows, sizeof *made);
  if (!made)
    return NO_MEMORY;
  *made = (shadow){.kind = kind, .depth = 1, .size = 1};
  done = machine_fill(m, made, start);
  if (done != DONE)
    return done;
  m->stack.count = start;
  return row_push(&m->stack, CONTAINER + number);
}

/* Moves the values from `start` on into the list or dict below them. */
static outcome machine_add(machine *m, unsigned char kind, size_t start)
{
  if (start <= machine_floor(m) || start > m->stack.count)
    return NOT_POSSIBLE;
  if (start == m->stack.count)
    return DONE; /* the loader does not look at the container then */
  shadow *into = shadow_of(m, row_numbers(&m->stack)[start - 1]);
  if (!into || into->kind != kind)
    return NOT_POSSIBLE;
  outcome done = kind == DICT ? machine_check_pairs(m, start) : DONE;
  if (done == DONE)
    done = into->held ? CIRCULAR : machine_fill(m, into, start);
  m->stack.count = start;
  return done;
}

static outcome memo_put(machine *m, uint64_t index)
{
  if (machine_above(m) == 0)
    return NOT_POSSIBLE;
  if (index > m->memo.count + 1) /* some picklers count from 1 */
    return MEMO_GAP;
  while (m->memo.count <= index) {
    outcome done = row_push(&m->memo, ABSENT);
    if (done != DONE)
      return done;
  }
  size_t *slot = &row_numbers(&m->memo)[index];
  m->memo_filled += *slot == ABSENT;
  *slot = row_numbers(&m->stack)[m->stack.count - 1];
  return DONE;
}

static outcome memo_get(machine *m, uint64_t index)
{
  if (index >= m->memo.count || row_numbers(&m->memo)[index] == ABSENT)
    return NOT_POSSIBLE;
  return row_push(&m->stack, row_numbers(&m->memo)[index]);
}

static outcome machine_pop(machine *m)
{
  if (machine_above(m) > 0)
    m->stack.count--;
  else if (m->marks.count > 0)
    m->marks.count--;
  else
    return NOT_POSSIBLE;
  return DONE;
}

outcome machine_step(machine *m, opcode op, uint64_t index)
{
  size_t above = machine_above(m), top = m->stack.count, start = 0;
  switch ((effect)op.effect) {
  case UNKNOWN:
  case REFUSED: return NOT_POSSIBLE;
  case NOTHING: return DONE;
  case STOP: return above > 0 ? DONE : NOT_POSSIBLE;
  case PUSH_SCALAR: return row_push(&m->stack, SCALAR);
  case PUSH_TUPLE: return machine_make(m, TUPLE, top);
  case PUSH_LIST: return machine_make(m, LIST, top);
  case PUSH_DICT: return machine_make(m, DICT, top);
  case TAKE_TUPLE: return above < op.width ? NOT_POSSIBLE : machine_make(m, TUPLE, top - op.width);
  case MARK_TUPLE: return mark_take(m, &start) ? machine_make(m, TUPLE, start) : NOT_POSSIBLE;
  case MARK_LIST: return mark_take(m, &start) ? machine_make(m, LIST, start) : NOT_POSSIBLE;
  case MARK_DICT: return mark_take(m, &start) ? machine_make(m, DICT, start) : NOT_POSSIBLE;
  case APPEND_ONE: return above < 2 ? NOT_POSSIBLE : machine_add(m, LIST, top - 1);
  case SET_ONE: return above < 3 ? NOT_POSSIBLE : machine_add(m, DICT, top - 2);
  case APPEND_MARKED: return mark_take(m, &start) ? machine_add(m, LIST, start) : NOT_POSSIBLE;
  case SET_MARKED: return mark_take(m, &start) ? machine_add(m, DICT, start) : NOT_POSSIBLE;
  case PUSH_MARK: return row_push(&m->marks, top);
  case POP_VALUE: return machine_pop(m);
  case POP_MARKED:
    if (!mark_take(m, &start))
      return NOT_POSSIBLE;
    m->stack.count = start;
    return DONE;
  case DUPLICATE:
    return above ? row_push(&m->stack, row_numbers(&m->stack)[top - 1]) : NOT_POSSIBLE;
  case MEMO_GET: return memo_get(m, index);
  case MEMO_PUT: return memo_put(m, index);
  case MEMO_APPEND: return memo_put(m, m->memo_filled); /* the loader counts entries, too */
  }
  return NOT_POSSIBLE;
}

void machine_free(machine *m)
{
  free(m->stack.items);
  free(m->marks.items);
  free(m->memo.items);
  free(m->shadows.items);
  *m = (machine){0};
}
