/* check.c: reads the opcodes one by one and makes the machine execute them. */
#include "check.h"

#include <string.h>

#include "machine.h"
#include "opcodes.h"

typedef struct reader {
  const unsigned char *data;
  size_t size, at;
} reader;

/* Reads a little-endian number; 0 if the data ends too early. */
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

/* Stores the text up to the next newline. */
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

/* Parses decimal digits. UINT64_MAX: something else, or an overflow. */
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

/* Reads an opcode's argument; 0 if the data ends too early. */
static int read_argument(reader *r, opcode op, uint64_t *index, uint64_t *cost)
{
  uint64_t number = 0;
  const char *line = NULL;
  size_t length = 0;
  switch ((argument)op.argument) {
  case NONE: return 1;
  case FIXED: return skip_bytes(r, op.width);
  case COUNTED:
    if (!read_number(r, op.width, &number) || !skip_bytes(r, number))
      return 0;
    *cost += 4 * number; /* a character may take four bytes */
    return 1;
  case LINE:
    if (!read_line(r, &line, &length))
      return 0;
    *cost += 4 * (uint64_t)length;
    return 1;
  case INDEX: return read_number(r, op.width, index);
  case INDEX_LINE:
    if (!read_line(r, &line, &length))
      return 0;
    *index = parse_index(line, length);
    return 1;
  }
  return 0;
}

static pickle_verdict judge_outcome(outcome done, size_t at, uint64_t cost)
{
  switch (done) {
  case TOO_DEEP: return (pickle_verdict){PICKLE_TOO_DEEP, at, NULL, cost};
  case CIRCULAR: return (pickle_verdict){PICKLE_CIRCULAR, at, NULL, cost};
  case HUGE_KEY: return (pickle_verdict){PICKLE_HUGE_KEY, at, NULL, cost};
  case NO_MEMORY: return (pickle_verdict){PICKLE_NO_MEMORY, at, NULL, cost};
  case MEMO_GAP:
    return (pickle_verdict){PICKLE_NOT_PLAIN, at,
                            "stores an object under an index that skips earlier ones", cost};
  case DONE:
  case NOT_POSSIBLE: break;
  }
  return (pickle_verdict){PICKLE_DAMAGED, at, "cannot follow what comes before it", cost};
}

static pickle_verdict check_opcodes(reader *r, machine *m, uint64_t cost_limit)
{
  uint64_t cost = r->size;
  while (r->at < r->size) {
    size_t at = r->at;
    unsigned char code = r->data[r->at++];
    opcode op = opcode_describe(code);
    if (op.effect == UNKNOWN)
      return (pickle_verdict){PICKLE_DAMAGED, at, "is not a pickle opcode", cost};
    if (op.effect == REFUSED)
      return (pickle_verdict){PICKLE_NOT_PLAIN, at, opcode_refusal(code), cost};
    uint64_t index = 0;
    if (!read_argument(r, op, &index, &cost))
      break;
    cost += op.cost;
    if (cost > cost_limit)
      return (pickle_verdict){PICKLE_COSTLY, at, NULL, cost};
    outcome done = machine_step(m, op, index);
    if (done != DONE)
      return judge_outcome(done, at, cost);
    if (op.effect == STOP)
      return (pickle_verdict){PICKLE_PLAIN, at, NULL, cost};
  }
  return (pickle_verdict){PICKLE_TRUNCATED, r->size, NULL, cost};
}

pickle_verdict pickle_check(const unsigned char *data, size_t size, uint64_t cost_limit)
{
  reader r = {data, size, 0};
  machine m = {0};
  pickle_verdict verdict = check_opcodes(&r, &m, cost_limit);
  machine_free(&m);
  return verdict;
}
