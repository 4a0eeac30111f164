/* opcodes.h: what each opcode of a pickle does, and what follows it in the file. */
#ifndef ESPER_PICKLE_OPCODES_H
#define ESPER_PICKLE_OPCODES_H

/* What an opcode does to the loader's stack and memo. */
typedef enum effect {
  UNKNOWN = 0, /* there is no such opcode */
  REFUSED,     /* looks up or calls something, or makes more than plain data */
  NOTHING,
  STOP,
  PUSH_SCALAR,
  PUSH_TUPLE, /* an empty one; so do the next two */
  PUSH_LIST,
  PUSH_DICT,
  TAKE_TUPLE, /* of the topmost `width` values */
  MARK_TUPLE, /* of all values above the mark; so do the next two */
  MARK_LIST,
  MARK_DICT,
  APPEND_ONE,
  APPEND_MARKED,
  SET_ONE,
  SET_MARKED,
  PUSH_MARK,
  POP_VALUE, /* or the mark if that is on top */
  POP_MARKED,
  DUPLICATE,
  MEMO_GET,
  MEMO_PUT,
  MEMO_APPEND
} effect;

/* What follows an opcode. */
typedef enum argument {
  NONE = 0,
  FIXED,   /* `width` bytes, ignored here */
  COUNTED, /* a length in `width` bytes, then that many bytes */
  LINE,    /* up to the next newline */
  INDEX,   /* an index of `width` bytes */
  INDEX_LINE
} argument;

typedef struct opcode {
  unsigned char effect;
  unsigned char argument;
  unsigned char width;
  unsigned char cost; /* bytes that loading it takes, besides its contents */
} opcode;

opcode opcode_describe(unsigned char code);

/* What a refused opcode does, as the end of a sentence. */
const char *opcode_refusal(unsigned char code);

#endif
