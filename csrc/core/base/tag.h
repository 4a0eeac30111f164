/* tag.h: tags, which name groups of memory that sleep and wake together. A tag is a number here.
 * Its name is known for as long as the process lives, so two cores give a name the same number. */
#ifndef ESPER_TAG_H
#define ESPER_TAG_H

#include "types.h"

enum {
  TAG_NONE = 0, /* of memory that was handed out outside every tag */
  TAGS = 256,
};

typedef uint8_t tag_t;

/* Whether any thread ever pushed a tag. Read by every malloc, so that programs without tags pay
 * for no thread-local variable. */
extern atomic_bool tags_exist;

/* The calling thread's innermost tag. */
tag_t tag_innermost(void);
static inline tag_t tag_current(void)
{
  return atomic_load_explicit(&tags_exist, memory_order_relaxed) ? tag_innermost() : TAG_NONE;
}

/* The number of the tag with that name; -1: no thread has pushed it. */
int tag_find(const char *name);
/* How many tags there are; they are numbered from 0, which is TAG_NONE. */
unsigned tag_count(void);
/* "" for TAG_NONE. */
const char *tag_name(tag_t tag);

#endif
