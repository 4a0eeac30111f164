#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "handoff.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PATIENCE_S = 10 };

typedef struct offer {
  uint64_t number; /* 0: a free place                                          */
  handoff_open *open;
  int device;
  uint64_t object;
} offer;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* all of this        */
static offer *offers;
static size_t offer_count;
static uint64_t last_number, own_key;
static int listening = -1;

/* ---- sockets ------------------------------------------------------------- */

static socklen_t address_of(uint64_t process, uint64_t key, struct sockaddr_un *address)
{
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1,
                        "esper_alloc-%llu-%016llx", (unsigned long long)process,
                        (unsigned long long)key);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(void)
{
  struct timeval patience = {.tv_sec = PATIENCE_S};
  int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (s < 0)
    return -1;
  setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  return s;
}

static int is_own_user(int s)
{
  struct ucred who;
  socklen_t size = sizeof who;
  return getsockopt(s, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 &&
         (who.uid == geteuid() || who.uid == 0);
}

/* An answer is a word, 0 or an errno, and with 0 a file. */
typedef struct message {
  struct msghdr header;
  struct iovec part;
  _Alignas(struct cmsghdr) char room[CMSG_SPACE(sizeof(int))];
} message;

static void message_init(message *m, int *word)
{
  *m = (message){.part = {.iov_base = word, .iov_len = sizeof *word}};
  m->header = (struct msghdr){.msg_iov = &m->part, .msg_iovlen = 1, .msg_control = m->room,
                              .msg_controllen = sizeof m->room};
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

static int receive_answer(int s, int *file)
{
  message m;
  int word = 0;
  message_init(&m, &word);
  ssize_t got = recvmsg(s, &m.header, MSG_CMSG_CLOEXEC);
  if (got < 0)
    return errno == EAGAIN || errno == EWOULDBLOCK ? ETIMEDOUT : errno;
  if (got != sizeof word)
    return ECONNRESET;
  const struct cmsghdr *c = CMSG_FIRSTHDR(&m.header);
  if (word || !c || c->cmsg_type != SCM_RIGHTS)
    return word ? word : EPROTO;
  memcpy(file, CMSG_DATA(c), sizeof *file);
  return 0;
}

/* ---- the offering process ------------------------------------------------ */

static void answer(int s)
{
  uint64_t number = 0;
  int file = -1, word = ENOENT;
  if (!is_own_user(s)) {
    send_answer(s, EACCES, -1);
    return;
  }
  if (recv(s, &number, sizeof number, 0) != sizeof number)
    return;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < offer_count && number; i++)
    if (offers[i].number == number) {
      file = offers[i].open(offers[i].device, offers[i].object);
      word = file < 0 ? EIO : 0;
    }
  pthread_mutex_unlock(&lock);
  send_answer(s, word, file);
  if (file >= 0)
    close(file);
}

static void *answer_all(void *unused)
{
  (void)unused;
  for (;;) {
    int s = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0) {
      if (errno == EBADF || errno == EINVAL)
        return NULL;
      usleep(1000); /* no file descriptor is left, say */
      continue;
    }
    struct timeval patience = {.tv_sec = PATIENCE_S};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    answer(s);
    close(s);
  }
}

static int begin_to_listen(void)
{
  struct sockaddr_un address;
  if (getrandom(&own_key, sizeof own_key, 0) != sizeof own_key)
    return errno;
  socklen_t length = address_of((uint64_t)getpid(), own_key, &address);
  listening = new_socket();
  if (listening < 0)
    return errno;
  struct timeval forever = {0};
  setsockopt(listening, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof forever);
  int error = 0;
  if (bind(listening, (struct sockaddr *)&address, length) || listen(listening, 64))
    error = errno;
  if (error) {
    close(listening);
    listening = -1;
  }
  return error;
}

/* The program's signals are not for this thread. */
static int begin_to_answer(void)
{
  pthread_t thread;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&thread, NULL, answer_all, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!error)
    pthread_detach(thread);
  return error;
}

static int begin(void)
{
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

int handoff_offer(handoff_open *open, int device, uint64_t object, handoff_name *name)
{
  pthread_mutex_lock(&lock);
  int error = listening < 0 ? begin() : 0;
  offer *place = error ? NULL : free_place();
  if (place) {
    *place = (offer){++last_number, open, device, object};
    *name = (handoff_name){(uint64_t)getpid(), own_key, last_number};
  }
  pthread_mutex_unlock(&lock);
  return place ? 0 : error ? error : ENOMEM;
}

void handoff_withdraw(uint64_t number)
{
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < offer_count; i++)
    if (offers[i].number == number)
      offers[i].number = 0;
  pthread_mutex_unlock(&lock);
}

/* ---- the taking process -------------------------------------------------- */

static int ask(int s, const handoff_name *name, int *file)
{
  struct sockaddr_un address;
  socklen_t length = address_of(name->process, name->key, &address);
  if (connect(s, (struct sockaddr *)&address, length))
    return errno == EAGAIN ? ETIMEDOUT : errno;
  if (!is_own_user(s))
    return EACCES;
  if (send(s, &name->number, sizeof name->number, MSG_NOSIGNAL) != sizeof name->number)
    return errno;
  return receive_answer(s, file);
}

int handoff_take(const handoff_name *name, int *file)
{
  int s = new_socket();
  if (s < 0)
    return errno;
  int error = ask(s, name, file);
  close(s);
  return error;
}
