/* front_gate.h: who may be at work in a front, and what those want who wait for it.
 *
 * A gate is a latch that can also be closed: malloc and free hold it for some ten
 * nanoseconds, or twice as long where a ledger goes to a purse; who has the device's
 * lock may hold it too, or close it. Who waits for it has no lock.
 *
 * A malloc that waits says what it wants. Whoever has paused all fronts because the room
 * below a peak is gone (ledger.h) grants these wishes, so the peak becomes that of all
 * mallocs that were under way. Else a thread that lacks room would take what another one
 * kept, which would stop everybody next: with a block each, sixteen threads would
 * have to be seen with sixteen blocks at one moment before they left each other alone. */
#ifndef ESPER_FRONT_GATE_H
#define ESPER_FRONT_GATE_H

#include "cache_slots.h"

enum { GATE_OPEN, GATE_HELD, GATE_CLOSED };

/* Nobody else reads or writes a wish while it is written, or looked at. */
enum { WISH_NONE, WISH_WRITTEN, WISH_MADE, WISH_GRANTED };

static inline bool gate_change(front_t *front, int from, int to)
{
  return atomic_compare_exchange_strong_explicit(&front->gate, &from, to, memory_order_acquire,
                                                 memory_order_relaxed);
}

bool gate_take_slowly(front_t *front, int to);

/* Once it is open. False: it is closed. */
static inline bool gate_take(front_t *front, int to)
{
  return __builtin_expect(gate_change(front, GATE_OPEN, to), 1) || gate_take_slowly(front, to);
}

static inline void gate_leave(front_t *front)
{
  atomic_store_explicit(&front->gate, GATE_OPEN, memory_order_release);
}

/* The same as gate_take for a malloc that found it not open. False: it is closed, or
 * `block`, which was NULL, was handed out meanwhile. */
bool gate_wait_wishing(front_t *front, size_t size, size_t requested, block_t **block);

/* ---- under the device's lock ---------------------------------------------- */

/* Nobody is at work in the front until it resumes; it keeps what it has. False: it is
 * closed, or paused already. */
bool front_pause(front_t *front);
void front_resume(front_t *front);
/* The same for those of the device. */
void fronts_pause(device_t *device);
void fronts_resume(device_t *device);

/* Closes the gate, whatever it is now. */
void front_shut(front_t *front);

/* While the front is paused: whether there is a wish, which waits for an answer. NULL: it
 * remains one. */
bool wish_look(wish_t *wish);
void wish_answer(wish_t *wish, block_t *block);
bool wish_is_valid(const wish_t *wish);

#endif
