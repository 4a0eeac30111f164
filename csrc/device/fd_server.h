/* fd_server.h: hands file descriptors to other processes of the same user.
 *
 * A thread of the offering process answers at a socket in the abstract namespace. Everybody on the
 * machine can read the socket's name. Therefore each offer has a secret random number, and only
 * processes that were told it get the file. At most 128 files stay open, because a driver takes a
 * millisecond to open one; the others are opened on request, so thousands of offers need no more
 * file descriptors. This needs no right to trace other processes, unlike pidfd_getfd(2),
 * which most containers and desktops refuse.
 *
 * A forked child offers nothing of its parent's and may make offers of its own. The answers end at
 * the process's exit, before libraries that were loaded at the first offer are unloaded. */
#ifndef ESPER_FD_SERVER_H
#define ESPER_FD_SERVER_H

#include <stdint.h>

/* The name of an offer, valid in any process. */
typedef struct fd_server_name {
  uint64_t process; /* its id, as the process itself sees it */
  uint64_t key;     /* random, since two containers may use the same id */
  uint64_t number;  /* of the offer: the secret */
} fd_server_name;

/* Opens what is offered as a file; -1 on failure. Called in the answering thread, and the offer
 * cannot be withdrawn meanwhile. */
typedef int fd_server_open(int device, uint64_t object);

/* Offers an object until it is withdrawn. `file` is the object as `open` opens it, or -1; it
 * belongs to the server from now on, also on failure. Returns 0 or an errno: no socket, no thread
 * or no host memory. */
int fd_server_offer(fd_server_open *open, int device, uint64_t object, int file,
                    fd_server_name *name);
void fd_server_withdraw(uint64_t number);

/* Takes what this or another process offers. The caller closes *file. Returns 0 or an errno:
 *   ECONNREFUSED  that process has ended or was never on this machine
 *   ECONNRESET    it ended while it was asked
 *   EACCES        it belongs to another user
 *   ENOENT        it does not offer this any more
 *   EIO           it could not open the file
 *   EMFILE        this process has no file descriptor left
 *   ETIMEDOUT     it does not answer */
int fd_server_take(const fd_server_name *name, int *file);

#endif
