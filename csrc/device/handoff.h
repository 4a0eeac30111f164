/* handoff.h: what one process offers, another of the same user takes, as an open file.
 *
 * A thread of the offering process answers at a socket in the abstract namespace, whose
 * name only those know who were given it. Files are opened when they are asked for, so
 * thousands of offers cost no file descriptor. Nobody needs the right to trace anybody,
 * which pidfd_getfd(2) asks for, and which most containers and desktops refuse. */
#ifndef ESPER_HANDOFF_H
#define ESPER_HANDOFF_H

#include <stdint.h>

/* What names an offer in any process. */
typedef struct handoff_name {
  uint64_t process; /* its id, as it sees itself                               */
  uint64_t key;     /* of the process: a secret of those that it tells         */
  uint64_t number;  /* of the offer                                            */
} handoff_name;

/* Opens what is offered, as a file that is closed after it was sent; or -1. Called in
 * the thread that answers, while nobody can withdraw the offer. */
typedef int handoff_open(int device, uint64_t object);

/* Offers an object until it is withdrawn. 0, or an errno: there is no socket, no thread
 * or no host memory. */
int handoff_offer(handoff_open *open, int device, uint64_t object, handoff_name *name);
void handoff_withdraw(uint64_t number);

/* Takes what another process, or this one, offers: *file is the caller's to close. 0, or
 * an errno: ECONNREFUSED: that process is gone, or was never of this machine; EACCES: it
 * is another user's; ENOENT: it does not offer this any more; ETIMEDOUT. */
int handoff_take(const handoff_name *name, int *file);

#endif
