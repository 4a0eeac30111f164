/* fd_server.h: a process hands file descriptors to other processes of the same user.
 *
 * A thread of the offering process answers at a socket in the abstract namespace. Anybody
 * on the machine can read that socket's name, so each offer has a number that nobody can
 * guess: only who was given it gets the file. Files are opened when they are asked for, so
 * thousands of offers cost no file descriptor. Nobody needs the right to trace anybody,
 * which pidfd_getfd(2) asks for, and which most containers and desktops refuse.
 *
 * A forked child offers nothing of its parent's, and may offer what is its own. When the
 * process exits the answers end, before libraries that were there at the first offer go. */
#ifndef ESPER_FD_SERVER_H
#define ESPER_FD_SERVER_H

#include <stdint.h>

/* What names an offer in any process. */
typedef struct fd_server_name {
  uint64_t process; /* its id, as it sees itself */
  uint64_t key;     /* random: the same id may be there in two containers */
  uint64_t number;  /* of the offer: a secret of those who were told */
} fd_server_name;

/* Opens what is offered, as a file that is closed after it was sent; or -1. Called in
 * the thread that answers, while nobody can withdraw the offer. */
typedef int fd_server_open(int device, uint64_t object);

/* Offers an object until it is withdrawn. 0, or an errno: there is no socket, no thread
 * or no host memory. */
int fd_server_offer(fd_server_open *open, int device, uint64_t object, fd_server_name *name);
void fd_server_withdraw(uint64_t number);

/* Takes what another process, or this one, offers: *file is the caller's to close. 0, or
 * an errno: ECONNREFUSED: that process is gone, or was never of this machine; ECONNRESET:
 * it went while it was asked; EACCES: it is another user's; ENOENT: it does not offer this
 * any more; EIO: it could not open the file; EMFILE: there is no room for it here;
 * ETIMEDOUT: it does not answer. */
int fd_server_take(const fd_server_name *name, int *file);

#endif
