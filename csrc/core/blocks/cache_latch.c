#include "cache_latch.h"

#include "block.h"
#include "heap.h"

static bool is_closed(const front_t *front)
{
  return atomic_load_explicit(&front->gate, memory_order_relaxed) == GATE_CLOSED;
}

__attribute__((noinline)) bool gate_take_slowly(front_t *front, int to)
{
  for (int turn = 0;; turn++) {
    int state = atomic_load_explicit(&front->gate, memory_order_relaxed);
    if (state == GATE_CLOSED)
      return false;
    if (state == GATE_OPEN && gate_change(front, GATE_OPEN, to))
      return true;
    wait_briefly(turn);
  }
}

/* ---- under the device's lock ---------------------------------------------- */

bool front_pause(front_t *front)
{
  if (front->stopped || is_closed(front) || !gate_take(front, GATE_HELD))
    return false;
  front->stopped = true;
  return true;
}

void front_resume(front_t *front)
{
  front->stopped = false;
  gate_leave(front);
}

void front_shut(front_t *front)
{
  if (front->stopped)
    atomic_store_explicit(&front->gate, GATE_CLOSED, memory_order_relaxed);
  else
    gate_take(front, GATE_CLOSED);
  front->stopped = front->paused = false;
}

void fronts_pause(device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    heap->front.paused = front_pause(&heap->front);
}

void fronts_resume(device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device) {
    if (heap->front.paused)
      front_resume(&heap->front);
    heap->front.paused = false;
  }
}

/* ---- wishes --------------------------------------------------------------- */

static bool wish_change(wish_t *wish, int from, int to)
{
  return atomic_compare_exchange_strong_explicit(&wish->state, &from, to, memory_order_acq_rel,
                                                 memory_order_acquire);
}

static bool wish_make(wish_t *wish, size_t size, size_t requested)
{
  if (!wish_change(wish, WISH_NONE, WISH_WRITTEN))
    return false;
  wish->size = size;
  wish->requested = requested;
  atomic_store_explicit(&wish->state, WISH_MADE, memory_order_release);
  return true;
}

/* NULL: it was not granted, and will not be. */
static block_t *wish_end(wish_t *wish)
{
  for (int turn = 0; !wish_change(wish, WISH_MADE, WISH_NONE); turn++) {
    if (atomic_load_explicit(&wish->state, memory_order_acquire) == WISH_GRANTED) {
      block_t *block = wish->block;
      atomic_store_explicit(&wish->state, WISH_NONE, memory_order_release);
      return block;
    }
    wait_briefly(turn); /* it is being looked at */
  }
  return NULL;
}

__attribute__((noinline)) bool gate_wait_wishing(front_t *front, size_t size, size_t requested,
                                                 block_t **block)
{
  if (is_closed(front))
    return false;
  bool wishing = wish_make(&front->wish, size, requested);
  bool held = gate_take_slowly(front, GATE_HELD);
  *block = wishing ? wish_end(&front->wish) : NULL;
  if (*block && held)
    gate_leave(front);
  return held && !*block;
}

bool wish_look(wish_t *wish)
{
  return atomic_load_explicit(&wish->state, memory_order_relaxed) == WISH_MADE &&
         wish_change(wish, WISH_MADE, WISH_WRITTEN);
}

void wish_answer(wish_t *wish, block_t *block)
{
  wish->block = block;
  atomic_store_explicit(&wish->state, block ? WISH_GRANTED : WISH_MADE, memory_order_release);
}

bool wish_is_valid(const wish_t *wish)
{
  int state = atomic_load_explicit(&wish->state, memory_order_acquire);
  return state >= WISH_NONE && state <= WISH_GRANTED &&
         (state != WISH_GRANTED || block_state_of(wish->block) == BLOCK_LIVE);
}
