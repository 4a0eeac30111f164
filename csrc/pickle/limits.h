/* limits.h: how much a pickle may demand of its loader. */
#ifndef ESPER_PICKLE_LIMITS_H
#define ESPER_PICKLE_LIMITS_H

/* Levels of nested containers. Python hashes and frees nested tuples recursively, and too many
 * levels crash the process. PyTorch's snapshots have fewer than 20. */
#define PICKLE_DEPTH_LIMIT 100

/* Values in a dictionary's key, including those of nested tuples. A small file can describe a tuple
 * that contains the same tuples again and again and takes years to hash. */
#define PICKLE_KEY_LIMIT 1000

#endif
