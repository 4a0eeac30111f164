/* limits.h: how much a pickle may ask of the one who loads it. */
#ifndef ESPER_PICKLE_LIMITS_H
#define ESPER_PICKLE_LIMITS_H

/* Levels of containers in each other. Python hashes and frees nested tuples by
 * recursion, and enough of them end the process. PyTorch's snapshots have fewer
 * than 20 levels. */
#define PICKLE_DEPTH_LIMIT 100

/* Values in a dictionary's key, those of nested tuples included. A small file
 * can describe a tuple that holds the same tuples again and again, and would
 * take years to hash. */
#define PICKLE_KEY_LIMIT 1000

#endif
