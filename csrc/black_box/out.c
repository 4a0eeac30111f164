#include "out.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PATIENCE_MS = 5000 };

/* Whether a socket that is full takes something again. */
static bool takes_more(int file)
{
  struct pollfd poller = {.fd = file, .events = POLLOUT};
  return poll(&poller, 1, PATIENCE_MS) > 0 || errno == EINTR;
}

void out_put(out_t *out, const void *data, size_t bytes)
{
  while (bytes && !out->error) {
    ssize_t done = out->is_socket ? send(out->file, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                  : write(out->file, data, bytes);
    if (done < 0 && errno != EINTR && !(out->is_socket && errno == EAGAIN && takes_more(out->file)))
      out->error = errno;
    if (done > 0) {
      data = (const char *)data + done;
      bytes -= (size_t)done;
    }
  }
}

void out_section(out_t *out, const char *name, uint64_t count, uint64_t bytes)
{
  box_section_t section = {.count = (uint32_t)count, .bytes = bytes};
  memcpy(section.name, name, sizeof section.name);
  out_put(out, &section, sizeof section);
}

void out_padding(out_t *out, uint64_t bytes)
{
  static const char zeros[8];
  out_put(out, zeros, -bytes & 7);
}
