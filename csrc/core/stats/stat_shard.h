/* ledger.h: what the statistics have still to hear of.
 *
 * Each heap counts what becomes live, free and satisfied in a ledger of its own, so
 * that threads on different streams write to no common line. A
 * ledger has room: so much may become active there before a peak could be passed.
 * All room together is never more than what lies between the figures and their
 * peaks. What a ledger has much of goes into one of the device's purses, and from there
 * to those who run out. Who finds nothing in any purse stops everybody, reads all
 * ledgers, and raises the peaks; so every peak is that of some order of the calls. */
#ifndef ESPER_LEDGER_H
#define ESPER_LEDGER_H

#include "../base/lock.h"
#include "../base/types.h"

/* How much of something: blocks, their bytes, the bytes asked for. */
typedef struct amounts {
  int64_t count, bytes, requested;
} amounts_t;

/* What the statistics have not yet heard of a heap's blocks (ledger.h). `room` is
 * by ESPER_ALL and size class, the rest by size class: small, large. */
typedef struct ledger {
  ON_ITS_OWN_LINE amounts_t room[ESPER_CLASSES]; /* may still become active without
                         any peak being passed                                */
  amounts_t taken[2];                            /* became live */
  amounts_t freed[2], satisfied[2];              /* not both at once */
  amounts_t paired[2];                           /* the lesser of these two: it is room again */
  amounts_t granted[ESPER_CLASSES];              /* of the room */
  unsigned number;                               /* goes to the purse of this number first */
  int64_t keeps, much; /* blocks: with room for more than `much` it shares, and keeps
                          room for so many                                    */
} ledger_t;

/* Room that no ledger has just now (ledger.h). */
typedef struct purse {
  ON_ITS_OWN_LINE latch_t latch; /* taken after a front's gate */
  atomic_bool empty;             /* has nothing; may be read without the latch */
  int frugal;                    /* visits for which a ledger keeps hardly anything */
  amounts_t left[ESPER_CLASSES];
} purse_t;

enum { PURSES = 8 };

static inline bool amounts_cover(const amounts_t *room, amounts_t wanted)
{
  return room->count >= wanted.count && room->bytes >= wanted.bytes &&
         room->requested >= wanted.requested;
}

static inline bool amounts_are_zero(amounts_t a)
{
  return !(a.count | a.bytes | a.requested);
}

static inline void amounts_add(amounts_t *sum, amounts_t more)
{
  sum->count += more.count;
  sum->bytes += more.bytes;
  sum->requested += more.requested;
}

static inline void amounts_sub(amounts_t *rest, amounts_t less)
{
  rest->count -= less.count;
  rest->bytes -= less.bytes;
  rest->requested -= less.requested;
}

/* ---- the front's gate is held, or it is closed ----------------------------- */

/* A block becomes live, whether there is room or not. */
static inline void ledger_overdraw(ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_sub(&ledger->room[ESPER_ALL], amount);
  amounts_sub(&ledger->room[ESPER_SMALL + large], amount);
  amounts_add(&ledger->taken[large], amount);
}

/* Room for some such blocks, from the purses. False: they have none for one. */
bool ledger_draw(device_t *device, ledger_t *ledger, bool large, amounts_t amount);
/* What is more than for some such blocks goes into a purse. */
void ledger_share(device_t *device, ledger_t *ledger, bool large, amounts_t amount);

/* A block becomes live. False: there is no room, and nothing has happened. */
static inline bool ledger_take(device_t *device, ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_t *all = &ledger->room[ESPER_ALL], *class = &ledger->room[ESPER_SMALL + large];
  if (__builtin_expect(!amounts_cover(all, amount) || !amounts_cover(class, amount), 0) &&
      !ledger_draw(device, ledger, large, amount))
    return false;
  ledger_overdraw(ledger, large, amount);
  return true;
}

/* One that is freed owes nothing, ... */
static inline void ledger_return(device_t *device, ledger_t *ledger, bool large, amounts_t amount)
{
  amounts_add(&ledger->room[ESPER_ALL], amount);
  amounts_add(&ledger->room[ESPER_SMALL + large], amount);
  if (__builtin_expect(ledger->room[ESPER_ALL].count > ledger->much, 0))
    ledger_share(device, ledger, large, amount);
}

/* ... or is active still, and owes nothing any more later. The one makes room below
 * the peaks of what is allocated, the other below those of what is active. */
void ledger_free(device_t *device, ledger_t *ledger, bool large, amounts_t amount);
void ledger_satisfy(device_t *device, ledger_t *ledger, bool large, amounts_t amount);

/* ---- the device's lock is held -------------------------------------------- */

/* The block's front may be open. */
void ledger_block_allocated(block_t *block);
void ledger_block_satisfied(const block_t *block);

/* The figures become exact, and all room is gone. The fronts are paused or closed. */
void ledgers_read(device_t *device);
/* Room is given out again: to the ledger of `block` (may be NULL) for one such block if
 * there is so much, and what is left to the purses. */
void ledgers_grant(device_t *device, const block_t *block);

/* A heap goes: its ledger with it. */
void ledgers_leave(heap_t *heap);

bool ledgers_are_valid(device_t *device);

#endif
