#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "fd_server.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum {
  /* How long each side waits for the other. An asker sends its number at once, so the server waits
   * less, because others are queueing. */
  PATIENCE_S = 10,
  PATIENCE_WITH_ASKERS_S = 2,
  KEPT = 128 /* an eighth of the files that many processes may open */
};

typedef struct offer {
  uint64_t number; /* 0: the entry is free */
  fd_server_open *open;
  int device;
  uint64_t object;
} offer;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the following */
static offer *offers;
static size_t offer_count;
static uint64_t own_key;
static int listening = -1;

/* Files that stay open for the next who asks, because a driver takes a millisecond to open one. A
 * forked child closes them without the lock, so the number of a place is set last and cleared
 * first. (One that is opened or closed during the fork may stay open there.) */
static struct {
  _Atomic uint64_t number; /* of the offer; 0: the place is free */
  int file;
} kept[KEPT];
static size_t next_kept;

/* The answering thread's socket and file at the moment; -1: none. */
static atomic_int asker = -1, answered = -1;

/* By system call, because glibc before 2.25 has no getrandom(3). */
static int make_random(uint64_t *number)
{
  long got = 0;
  for (*number = 0; !*number;) {
    do
      got = syscall(SYS_getrandom, number, sizeof *number, 0);
    while (got < 0 && errno == EINTR);
    if (got != sizeof *number)
      return got < 0 ? errno : EIO;
  }
  return 0;
}

/* ---- sockets ------------------------------------------------------------- */

static socklen_t address_of(uint64_t process, uint64_t key, struct sockaddr_un *address)
{
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  int length =
      snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "esper_alloc-%llu-%016llx",
               (unsigned long long)process, (unsigned long long)key);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(void)
{
  return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
}

static void set_patience(int s, int seconds)
{
  struct timeval patience = {.tv_sec = seconds};
  setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

/* Both sides check this before they send anything. */
static bool is_own_user(int s)
{
  struct ucred who;
  socklen_t size = sizeof who;
  return getsockopt(s, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && who.uid == geteuid();
}

/* An answer is 0 with a file, or an errno. There is space for one file only. */
typedef struct message {
  struct msghdr header;
  struct iovec part;
  _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
} message;

static void message_init(message *m, int *word)
{
  *m = (message){.part = {.iov_base = word, .iov_len = sizeof *word}};
  m->header = (struct msghdr){.msg_iov = &m->part,
                              .msg_iovlen = 1,
                              .msg_control = m->control,
                              .msg_controllen = CMSG_LEN(sizeof(int))};
}

static void send_answer(int s, int word, int file)
{
  message m;
  message_init(&m, &word);
  if (file < 0) {
    m.header.msg_control = NULL;
    m.header.msg_controllen = 0;
  } else {
    struct cmsghdr *c = CMSG_FIRSTHDR(&m.header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(c), &file, sizeof file);
  }
  sendmsg(s, &m.header, MSG_NOSIGNAL);
}

static int file_in(const message *m)
{
  int file = -1;
  const struct cmsghdr *c = CMSG_FIRSTHDR(&m->header);
  if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
      c->cmsg_len == CMSG_LEN(sizeof file))
    memcpy(&file, CMSG_DATA(c), sizeof file);
  return file;
}

static int receive_answer(int s, int *file)
{
  message m;
  int word = 0;
  ssize_t got;
  message_init(&m, &word);
  do
    got = recvmsg(s, &m.header, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  if (got < 0)
    return errno == EAGAIN || errno == EWOULDBLOCK ? ETIMEDOUT : errno;
  int received = file_in(&m), error = got == sizeof word ? word : ECONNRESET;
  if (!error && received < 0) /* our table of files is full */
    error = m.header.msg_flags & MSG_CTRUNC ? EMFILE : EPROTO;
  if (!error)
    *file = received;
  else if (received >= 0)
    close(received);
  return error;
}

/* ---- the offering process ------------------------------------------------ */

static void close_kept(size_t i)
{
  if (atomic_exchange(&kept[i].number, 0))
    close(kept[i].file);
}

/* The place of an offer's file, or a free one if the number is 0; KEPT: there is none. */
static size_t place_of(uint64_t number)
{
  size_t i = 0;
  while (i < KEPT && atomic_load(&kept[i].number) != number)
    i++;
  return i;
}

static void keep(uint64_t number, int file)
{
  if (file < 0)
    return;
  size_t i = place_of(0);
  if (i == KEPT)
    i = next_kept++ % KEPT;
  close_kept(i);
  fcntl(file, F_SETFD, FD_CLOEXEC);
  kept[i].file = file;
  atomic_store(&kept[i].number, number);
}

/* A file of its own for the asker, since the kept one may be closed before it is sent; -1: none.
 * Where no descriptor is left, it gets the kept one. */
static int open_for_asker(const offer *asked)
{
  if (place_of(asked->number) == KEPT)
    keep(asked->number, asked->open(asked->device, asked->object));
  size_t i = place_of(asked->number);
  if (i == KEPT)
    return -1;
  int file = fcntl(kept[i].file, F_DUPFD_CLOEXEC, 0);
  if (file < 0 && atomic_exchange(&kept[i].number, 0))
    file = kept[i].file;
  return file;
}

static bool receive_number(int s, uint64_t *number)
{
  ssize_t got;
  do
    got = recv(s, number, sizeof *number, 0);
  while (got < 0 && errno == EINTR);
  return got == sizeof *number;
}

static void answer(int s)
{
  uint64_t number = 0;
  int file = -1, word = ENOENT;
  if (!is_own_user(s) || !receive_number(s, &number))
    return;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < offer_count && number; i++)
    if (offers[i].number == number) {
      file = open_for_asker(&offers[i]);
      word = file < 0 ? EIO : 0;
    }
  atomic_store(&answered, file);
  pthread_mutex_unlock(&lock);
  send_answer(s, word, file);
  atomic_store(&answered, -1);
  if (file >= 0)
    close(file);
}

/* Whether accepting again is pointless. */
static bool is_over(int error)
{
  return error == EBADF || error == EINVAL || error == ENOTSOCK || error == EOPNOTSUPP;
}

static void *answer_all(void *at)
{
  for (;;) {
    int s = accept4((int)(intptr_t)at, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0 && is_over(errno))
      return NULL;
    if (s < 0) {
      usleep(1000); /* for example, no file descriptor is left */
      continue;
    }
    atomic_store(&asker, s);
    set_patience(s, PATIENCE_WITH_ASKERS_S);
    answer(s);
    atomic_store(&asker, -1);
    close(s);
  }
}

static int begin_to_listen(void)
{
  struct sockaddr_un address;
  int error = make_random(&own_key);
  if (error)
    return error;
  socklen_t length = address_of((uint64_t)getpid(), own_key, &address);
  listening = new_socket();
  if (listening < 0)
    return errno;
  if (bind(listening, (struct sockaddr *)&address, length) || listen(listening, 64)) {
    error = errno;
    close(listening);
    listening = -1;
  }
  return error;
}

static void block_signals(sigset_t *before)
{
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, before);
}

/* With all signals blocked: this thread must not handle the program's. */
static int begin_to_answer(void)
{
  pthread_t thread;
  sigset_t before;
  block_signals(&before);
  int error = pthread_create(&thread, NULL, answer_all, (void *)(intptr_t)listening);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!error)
    pthread_detach(thread);
  return error;
}

/* A forked child has no answering thread. It closes the sockets it inherited; otherwise a process
 * that asks the parent after its end would wait for an answer. Its files would keep what the parent
 * has withdrawn. */
static void begin_anew(void)
{
  int files[] = {listening, atomic_exchange(&asker, -1), atomic_exchange(&answered, -1)};
  for (int i = 0; i < 3; i++)
    if (files[i] >= 0)
      close(files[i]);
  for (size_t i = 0; i < KEPT; i++)
    close_kept(i);
  listening = -1;
  if (pthread_mutex_trylock(&lock) == 0) /* else another thread was changing them */
    free(offers);
  lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  offers = NULL;
  offer_count = 0;
}

/* Runs at exit before the driver is unloaded, since the driver was loaded first. Afterwards nobody
 * calls it. */
static void stop(void)
{
  pthread_mutex_lock(&lock);
  offer_count = 0;
  if (listening >= 0)
    shutdown(listening, SHUT_RDWR);
  pthread_mutex_unlock(&lock);
}

static int begin(void)
{
  static bool registered;
  if (!registered && (pthread_atfork(NULL, NULL, begin_anew) || atexit(stop)))
    return ENOMEM;
  registered = true;
  int error = begin_to_listen();
  if (!error && (error = begin_to_answer())) {
    close(listening);
    listening = -1;
  }
  return error;
}

static offer *free_place(void)
{
  for (size_t i = 0; i < offer_count; i++)
    if (!offers[i].number)
      return &offers[i];
  size_t count = offer_count ? 2 * offer_count : 64;
  offer *more = realloc(offers, count * sizeof *more);
  if (!more)
    return NULL;
  memset(more + offer_count, 0, (count - offer_count) * sizeof *more);
  offers = more;
  more += offer_count;
  offer_count = count;
  return more;
}

int fd_server_offer(fd_server_open *open, int device, uint64_t object, int file,
                    fd_server_name *name)
{
  uint64_t number;
  pthread_mutex_lock(&lock);
  int error = listening < 0 ? begin() : 0;
  if (!error)
    error = make_random(&number);
  offer *place = error ? NULL : free_place();
  if (place) {
    *place = (offer){number, open, device, object};
    *name = (fd_server_name){(uint64_t)getpid(), own_key, number};
    keep(number, file);
  } else if (file >= 0) {
    close(file);
  }
  pthread_mutex_unlock(&lock);
  return place ? 0 : error ? error : ENOMEM;
}

void fd_server_withdraw(uint64_t number)
{
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < offer_count; i++)
    if (offers[i].number == number)
      offers[i].number = 0;
  size_t place = number ? place_of(number) : KEPT;
  if (place < KEPT)
    close_kept(place);
  pthread_mutex_unlock(&lock);
}

/* ---- the taking process -------------------------------------------------- */

static int ask(int s, const fd_server_name *name, int *file)
{
  struct sockaddr_un address;
  socklen_t length = address_of(name->process, name->key, &address);
  ssize_t done;
  do
    done = connect(s, (struct sockaddr *)&address, length);
  while (done < 0 && errno == EINTR);
  if (done < 0)
    return errno == EAGAIN ? ETIMEDOUT : errno;
  if (!is_own_user(s))
    return EACCES;
  do
    done = send(s, &name->number, sizeof name->number, MSG_NOSIGNAL);
  while (done < 0 && errno == EINTR);
  if (done < 0)
    return errno == EPIPE ? ECONNRESET : errno;
  return receive_answer(s, file);
}

/* With signals blocked, because each one would restart the timeout. */
int fd_server_take(const fd_server_name *name, int *file)
{
  int s = new_socket();
  if (s < 0)
    return errno;
  sigset_t before;
  block_signals(&before);
  set_patience(s, PATIENCE_S);
  int error = ask(s, name, file);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  close(s);
  return error;
}
