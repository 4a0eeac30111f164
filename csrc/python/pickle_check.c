/* pickle_check.c: reads a pickle's opcodes without obeying them.
 *
 * A pickle is a program. Before a snapshot is loaded, this pass makes sure
 * that its program can only build containers and scalars, that it is whole,
 * and that it cannot make the loader allocate out of proportion: memo indexes
 * must have been reached one by one (the loader's memo is an array as long as
 * its highest index), and the cost of what is built is added up. */
#define PY_SSIZE_T_CLEAN
#include "pickle_check.h"

#include <stdint.h>
#include <string.h>

/* What follows an opcode. */
typedef enum argument {
  REFUSED = 0, /* would look up or call something */
  UNKNOWN,     /* no opcode at all */
  NOTHING,
  FIXED,      /* `width` bytes */
  COUNTED,    /* a length of `width` bytes, then as many bytes */
  LINE,       /* up to the next newline */
  MEMO_FIXED, /* stores under an index of `width` bytes */
  MEMO_LINE,  /* stores under an index in decimal */
  MEMO_NEXT,  /* stores under the next index */
  STOP
} argument;

typedef struct opcode {
  unsigned char argument;
  unsigned char width;
  unsigned char cost; /* bytes that the object takes beside its contents */
} opcode;

enum { CONTAINER_COST = 72, SCALAR_COST = 32, ITEM_COST = 8 };

static opcode describe_opcode(unsigned char code)
{
  switch (code) {
  case '.': return (opcode){STOP, 0, 0};
  /* Containers, and what fills them. */
  case ']':
  case '}':
  case ')':
  case 'l':
  case 'd':
  case 't':
  case 0x85:
  case 0x86:
  case 0x87: return (opcode){NOTHING, 0, CONTAINER_COST};
  case 'a':
  case 'e':
  case 's':
  case 'u': return (opcode){NOTHING, 0, 0};
  /* The stack. */
  case '(':
  case '0':
  case '1':
  case '2': return (opcode){NOTHING, 0, ITEM_COST};
  case 'g': return (opcode){LINE, 0, ITEM_COST};
  case 'h': return (opcode){FIXED, 1, ITEM_COST};
  case 'j': return (opcode){FIXED, 4, ITEM_COST};
  case 'p': return (opcode){MEMO_LINE, 0, ITEM_COST};
  case 'q': return (opcode){MEMO_FIXED, 1, ITEM_COST};
  case 'r': return (opcode){MEMO_FIXED, 4, ITEM_COST};
  case 0x94: return (opcode){MEMO_NEXT, 0, ITEM_COST};
  /* Scalars. */
  case 'N':
  case 0x88:
  case 0x89: return (opcode){NOTHING, 0, ITEM_COST};
  case 'K': return (opcode){FIXED, 1, ITEM_COST};
  case 'M': return (opcode){FIXED, 2, SCALAR_COST};
  case 'J': return (opcode){FIXED, 4, SCALAR_COST};
  case 'G': return (opcode){FIXED, 8, SCALAR_COST};
  case 'I':
  case 'L':
  case 'F':
  case 'S':
  case 'V': return (opcode){LINE, 0, SCALAR_COST};
  case 'U':
  case 'C':
  case 0x8a:
  case 0x8c: return (opcode){COUNTED, 1, SCALAR_COST};
  case 'T':
  case 'B':
  case 'X':
  case 0x8b: return (opcode){COUNTED, 4, SCALAR_COST};
  case 0x8d:
  case 0x8e: return (opcode){COUNTED, 8, SCALAR_COST};
  /* The format itself. */
  case 0x80: return (opcode){FIXED, 1, 0};
  case 0x95: return (opcode){FIXED, 8, 0};
  /* Globals, calls, instances, persistent ids, extensions, buffers, sets. */
  case 'c':
  case 0x93:
  case 'R':
  case 'b':
  case 'i':
  case 'o':
  case 0x81:
  case 0x92:
  case 'P':
  case 'Q':
  case 0x82:
  case 0x83:
  case 0x84:
  case 0x96:
  case 0x97:
  case 0x98:
  case 0x8f:
  case 0x90:
  case 0x91: return (opcode){REFUSED, 0, 0};
  default: return (opcode){UNKNOWN, 0, 0};
  }
}

static const char *name_refused(unsigned char code)
{
  switch (code) {
  case 'c':
  case 0x93: return "asks to import a Python object";
  case 'R':
  case 'o':
  case 'i':
  case 0x81:
  case 0x92: return "asks to call a Python object";
  case 'b': return "asks to set a Python object's state";
  case 'P':
  case 'Q': return "asks for an object outside the file";
  case 0x82:
  case 0x83:
  case 0x84: return "asks for a registered extension";
  default: return "holds something other than plain containers and scalars";
  }
}

typedef struct reader {
  const unsigned char *data;
  size_t size, at;
} reader;

/* A little-endian number; 0 when the data ends before it does. */
static int read_number(reader *r, unsigned width, uint64_t *number)
{
  if (r->size - r->at < width)
    return 0;
  *number = 0;
  for (unsigned i = 0; i < width; i++)
    *number |= (uint64_t)r->data[r->at + i] << (8 * i);
  r->at += width;
  return 1;
}

static int skip_bytes(reader *r, uint64_t count)
{
  if (r->size - r->at < count)
    return 0;
  r->at += (size_t)count;
  return 1;
}

/* Leaves *line at the text before the next newline. */
static int read_line(reader *r, const char **line, size_t *length)
{
  const unsigned char *start = r->data + r->at;
  const unsigned char *end = memchr(start, '\n', r->size - r->at);
  if (!end)
    return 0;
  *line = (const char *)start;
  *length = (size_t)(end - start);
  r->at += *length + 1;
  return 1;
}

/* Decimal digits; anything else, and what would overflow, is UINT64_MAX. */
static uint64_t parse_index(const char *text, size_t length)
{
  uint64_t value = 0;
  if (length == 0 || length > 18)
    return UINT64_MAX;
  for (size_t i = 0; i < length; i++) {
    if (text[i] < '0' || text[i] > '9')
      return UINT64_MAX;
    value = value * 10 + (uint64_t)(text[i] - '0');
  }
  return value;
}

typedef enum finding { PLAIN, TRUNCATED, NOT_A_PICKLE, NOT_PLAIN } finding;

typedef struct verdict {
  finding found;
  size_t at;       /* the byte that is wrong */
  const char *why; /* what that byte does */
  uint64_t cost;   /* bytes that loading takes, roughly */
} verdict;

static verdict check_pickle(const unsigned char *data, size_t size)
{
  reader r = {data, size, 0};
  uint64_t cost = size;
  uint64_t memos = 0; /* indexes below this one may have been stored */

  while (r.at < size) {
    size_t at = r.at;
    unsigned char code = data[r.at++];
    opcode op = describe_opcode(code);
    uint64_t number = 0;
    const char *line = NULL;
    size_t length = 0;
    int whole = 1;

    switch ((argument)op.argument) {
    case STOP: return (verdict){PLAIN, at, NULL, cost};
    case REFUSED: return (verdict){NOT_PLAIN, at, name_refused(code), cost};
    case UNKNOWN: return (verdict){NOT_A_PICKLE, at, "is no part of a pickle", cost};
    case NOTHING: break;
    case FIXED: whole = skip_bytes(&r, op.width); break;
    case COUNTED:
      whole = read_number(&r, op.width, &number) && skip_bytes(&r, number);
      if (whole)
        cost += 4 * number; /* a character may take four bytes */
      break;
    case LINE:
      whole = read_line(&r, &line, &length);
      cost += 4 * length;
      break;
    case MEMO_FIXED: whole = read_number(&r, op.width, &number); break;
    case MEMO_LINE:
      whole = read_line(&r, &line, &length);
      if (whole)
        number = parse_index(line, length);
      break;
    case MEMO_NEXT: number = memos; break;
    }
    if (!whole)
      break;
    if (op.argument >= MEMO_FIXED && op.argument <= MEMO_NEXT) {
      if (number > memos + 1) /* some picklers count from 1 */
        return (verdict){NOT_PLAIN, at, "stores under an index out of order", cost};
      if (number >= memos)
        memos = number + 1;
    }
    cost += op.cost;
  }
  return (verdict){TRUNCATED, size, NULL, cost};
}

const char esper_py_check_pickle_doc[] =
    "check_pickle(data, /) -> int\n--\n\n"
    "Makes sure that `data` starts with a whole pickle of plain containers and\n"
    "scalars, without loading it, and returns about how many bytes loading it\n"
    "would take. Raises ValueError, saying which byte is wrong and why.";

PyObject *esper_py_check_pickle(PyObject *self, PyObject *data)
{
  (void)self;
  Py_buffer view;
  if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
    return NULL;
  verdict v;
  Py_BEGIN_ALLOW_THREADS v = check_pickle(view.buf, (size_t)view.len);
  Py_END_ALLOW_THREADS
      /* Protocol 2 and later begin with this byte; snapshots always do. What
   * does not is rather no pickle than a hostile one. */
      int marked = view.len > 0 && *(const unsigned char *)view.buf == 0x80;
  PyBuffer_Release(&view);

  switch (v.found) {
  case PLAIN: return PyLong_FromUnsignedLongLong(v.cost);
  case TRUNCATED:
    if (marked)
      return PyErr_Format(PyExc_ValueError,
                          "truncated: it ends at byte %zu, before its pickle does", v.at);
    return PyErr_Format(PyExc_ValueError, "not a memory snapshot: it is no whole pickle");
  case NOT_PLAIN:
    if (marked)
      return PyErr_Format(PyExc_ValueError,
                          "refused: byte %zu %s; a memory snapshot has only plain "
                          "containers and scalars",
                          v.at, v.why);
    break;
  case NOT_A_PICKLE: break;
  }
  return PyErr_Format(PyExc_ValueError, "not a memory snapshot: byte %zu %s", v.at, v.why);
}
