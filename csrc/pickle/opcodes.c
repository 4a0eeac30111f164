/* opcodes.c: the table of all opcodes of protocols 0 to 5. */
#include "opcodes.h"

enum { CONTAINER_COST = 72, SCALAR_COST = 32, ITEM_COST = 8 };

static const opcode table[256] = {
    ['.'] = {STOP, NONE, 0, 0},
    /* Containers. */
    [')'] = {PUSH_TUPLE, NONE, 0, CONTAINER_COST},
    [']'] = {PUSH_LIST, NONE, 0, CONTAINER_COST},
    ['}'] = {PUSH_DICT, NONE, 0, CONTAINER_COST},
    [0x85] = {TAKE_TUPLE, NONE, 1, CONTAINER_COST},
    [0x86] = {TAKE_TUPLE, NONE, 2, CONTAINER_COST},
    [0x87] = {TAKE_TUPLE, NONE, 3, CONTAINER_COST},
    ['t'] = {MARK_TUPLE, NONE, 0, CONTAINER_COST},
    ['l'] = {MARK_LIST, NONE, 0, CONTAINER_COST},
    ['d'] = {MARK_DICT, NONE, 0, CONTAINER_COST},
    /* What fills containers. */
    ['a'] = {APPEND_ONE, NONE, 0, 0},
    ['e'] = {APPEND_MARKED, NONE, 0, 0},
    ['s'] = {SET_ONE, NONE, 0, 0},
    ['u'] = {SET_MARKED, NONE, 0, 0},
    /* The stack. */
    ['('] = {PUSH_MARK, NONE, 0, ITEM_COST},
    ['0'] = {POP_VALUE, NONE, 0, ITEM_COST},
    ['1'] = {POP_MARKED, NONE, 0, ITEM_COST},
    ['2'] = {DUPLICATE, NONE, 0, ITEM_COST},
    /* The memo. */
    ['g'] = {MEMO_GET, INDEX_LINE, 0, ITEM_COST},
    ['h'] = {MEMO_GET, INDEX, 1, ITEM_COST},
    ['j'] = {MEMO_GET, INDEX, 4, ITEM_COST},
    ['p'] = {MEMO_PUT, INDEX_LINE, 0, ITEM_COST},
    ['q'] = {MEMO_PUT, INDEX, 1, ITEM_COST},
    ['r'] = {MEMO_PUT, INDEX, 4, ITEM_COST},
    [0x94] = {MEMO_APPEND, NONE, 0, ITEM_COST},
    /* Scalars: None, True and False, */
    ['N'] = {PUSH_SCALAR, NONE, 0, ITEM_COST},
    [0x88] = {PUSH_SCALAR, NONE, 0, ITEM_COST},
    [0x89] = {PUSH_SCALAR, NONE, 0, ITEM_COST},
    /* numbers, */
    ['K'] = {PUSH_SCALAR, FIXED, 1, ITEM_COST},
    ['M'] = {PUSH_SCALAR, FIXED, 2, SCALAR_COST},
    ['J'] = {PUSH_SCALAR, FIXED, 4, SCALAR_COST},
    ['G'] = {PUSH_SCALAR, FIXED, 8, SCALAR_COST},
    ['I'] = {PUSH_SCALAR, LINE, 0, SCALAR_COST},
    ['L'] = {PUSH_SCALAR, LINE, 0, SCALAR_COST},
    ['F'] = {PUSH_SCALAR, LINE, 0, SCALAR_COST},
    [0x8a] = {PUSH_SCALAR, COUNTED, 1, SCALAR_COST},
    [0x8b] = {PUSH_SCALAR, COUNTED, 4, SCALAR_COST},
    /* strings and bytes. */
    ['S'] = {PUSH_SCALAR, LINE, 0, SCALAR_COST},
    ['V'] = {PUSH_SCALAR, LINE, 0, SCALAR_COST},
    ['U'] = {PUSH_SCALAR, COUNTED, 1, SCALAR_COST},
    ['T'] = {PUSH_SCALAR, COUNTED, 4, SCALAR_COST},
    ['C'] = {PUSH_SCALAR, COUNTED, 1, SCALAR_COST},
    ['B'] = {PUSH_SCALAR, COUNTED, 4, SCALAR_COST},
    ['X'] = {PUSH_SCALAR, COUNTED, 4, SCALAR_COST},
    [0x8c] = {PUSH_SCALAR, COUNTED, 1, SCALAR_COST},
    [0x8d] = {PUSH_SCALAR, COUNTED, 8, SCALAR_COST},
    [0x8e] = {PUSH_SCALAR, COUNTED, 8, SCALAR_COST},
    /* The format itself: its version, and the length of a frame. */
    [0x80] = {NOTHING, FIXED, 1, 0},
    [0x95] = {NOTHING, FIXED, 8, 0},
    /* Globals, calls, and objects' state. */
    ['c'] = {REFUSED, NONE, 0, 0},
    ['i'] = {REFUSED, NONE, 0, 0},
    ['o'] = {REFUSED, NONE, 0, 0},
    ['R'] = {REFUSED, NONE, 0, 0},
    ['b'] = {REFUSED, NONE, 0, 0},
    [0x81] = {REFUSED, NONE, 0, 0},
    [0x92] = {REFUSED, NONE, 0, 0},
    [0x93] = {REFUSED, NONE, 0, 0},
    /* Persistent ids and extensions. */
    ['P'] = {REFUSED, NONE, 0, 0},
    ['Q'] = {REFUSED, NONE, 0, 0},
    [0x82] = {REFUSED, NONE, 0, 0},
    [0x83] = {REFUSED, NONE, 0, 0},
    [0x84] = {REFUSED, NONE, 0, 0},
    /* Sets and buffers. */
    [0x8f] = {REFUSED, NONE, 0, 0},
    [0x90] = {REFUSED, NONE, 0, 0},
    [0x91] = {REFUSED, NONE, 0, 0},
    [0x96] = {REFUSED, NONE, 0, 0},
    [0x97] = {REFUSED, NONE, 0, 0},
    [0x98] = {REFUSED, NONE, 0, 0},
};

opcode opcode_describe(unsigned char code)
{
  return table[code];
}

const char *opcode_refusal(unsigned char code)
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
  default: return "contains something other than plain containers and scalars";
  }
}
