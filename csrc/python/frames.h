/* frames.h: where in a Python program the calling thread is. */
#ifndef ESPER_FRAMES_H
#define ESPER_FRAMES_H

/* The number of the place (black_box/sites.h); 0: the thread runs no Python. Needs no GIL, but for
 * the first time at a place, when it takes it to find the names. */
unsigned esper_py_site(void);

#endif
