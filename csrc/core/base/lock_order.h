/* lock_order.h: the order in which a thread may take locks, and a checker for it.
 *
 * Every lock has a rank. A thread takes locks in rising order, and calls the driver only while it
 * holds none from LOCK_DEVICE on. It may hold several sleep locks, taken in the order of the
 * devices, which nothing checks. Only the lock of tag.c has no rank: a thread that holds it takes
 * no other. A build with -DESPER_LOCK_ORDER checks the rest, and aborts with a message that names
 * what went wrong. Debug and sanitizer builds do that. */
#ifndef ESPER_LOCK_ORDER_H
#define ESPER_LOCK_ORDER_H

/* R(name, its name in messages), in the order in which locks are taken. */
#define LOCK_RANKS(R)                                                \
  R(UNRANKED, "a lock without a rank")                               \
  R(CONFIG, "the configuration lock")                                \
  R(SLEEP, "a device's sleep lock")                                  \
  R(SENDING, "a device's sending lock")                              \
  R(SYNC, "a device's sync lock")                                    \
  R(GROWTH, "a device's growth lock")                                \
  R(RECORD, "a stream's record lock")                                \
  R(DEVICE, "a device's lock")                                       \
  R(CACHE, "a block cache's latch")                                  \
  R(LEAF, "the lock of the map, of the streams, captures or events") \
  R(CREDIT, "a credit pool's latch")

typedef enum lock_rank {
#define LOCK_RANK_ENUM(name, says) LOCK_##name,
  LOCK_RANKS(LOCK_RANK_ENUM)
#undef LOCK_RANK_ENUM
      LOCK_RANK_COUNT
} lock_rank;

#ifdef ESPER_LOCK_ORDER
/* Aborts if the calling thread may not take a lock of this rank now. */
void lock_order_check(lock_rank rank);
void lock_order_take(lock_rank rank);
void lock_order_leave(lock_rank rank);
void lock_order_call_driver(void);
/* How many locks of this rank the calling thread has taken so far. */
unsigned long lock_order_taken(lock_rank rank);
#else
#define lock_order_check(rank) ((void)0)
#define lock_order_take(rank) ((void)0)
#define lock_order_leave(rank) ((void)0)
#define lock_order_call_driver() ((void)0)
#endif

#endif
