/* out.h: writes a file of a black box, or the same to a socket. Calls only what a signal's handler
 * may call. */
#ifndef ESPER_BLACK_BOX_OUT_H
#define ESPER_BLACK_BOX_OUT_H

#include <stdbool.h>

#include "format.h"

typedef struct out {
  int file, error; /* an errno: nothing is written any more */
  bool is_socket;
} out_t;

/* A socket that takes nothing for five seconds is an error. */
void out_put(out_t *out, const void *data, size_t bytes);
void out_section(out_t *out, const char *name, uint64_t count, uint64_t bytes);
/* Sections begin at multiples of 8 bytes. */
void out_padding(out_t *out, uint64_t bytes);

#endif
