/* standalone.c: a small fuzzer for compilers that bring none.
 *
 *   PROGRAM [-runs=N] [-seed=S] [-max_total_time=SECONDS] FOLDER...
 *
 * Runs every file of the folders, then N changed ones: it splices, repeats,
 * overwrites and cuts, with a preference for opcodes. The same seed, which is the
 * time where none is given, makes the same inputs. It knows nothing of coverage.
 * An input that fails is left in crash.pickle. The options are libFuzzer's, so
 * that one command suits both. */
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { MOST_BYTES = 4096, MOST_SEEDS = 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct input {
  uint8_t *data;
  size_t size;
} input;

static input seeds[MOST_SEEDS];
static size_t seed_count;
static uint64_t state;
static input running;

static uint64_t draw(uint64_t below)
{
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

/* Only calls that a signal handler may make. */
static void keep_running(void)
{
  int file = open("crash.pickle", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file >= 0) {
    ssize_t written = write(file, running.data, running.size);
    (void)written;
    close(file);
  }
}

static void on_abort(int number)
{
  keep_running();
  signal(number, SIG_DFL);
  raise(number);
}

/* In memory of just that size, so that a sanitizer sees every step beyond it. */
static void run_bytes(const uint8_t *data, size_t size)
{
  running = (input){malloc(size ? size : 1), size};
  if (!running.data)
    abort();
  memcpy(running.data, data, size);
  LLVMFuzzerTestOneInput(running.data, size);
  free(running.data);
}

static int compare_names(const struct dirent **left, const struct dirent **right)
{
  return strcmp((*left)->d_name, (*right)->d_name);
}

static void read_seed(const char *path)
{
  FILE *file = fopen(path, "rb");
  uint8_t *data = malloc(MOST_BYTES);
  if (!file || !data) {
    perror(path);
    exit(2);
  }
  seeds[seed_count++] = (input){data, fread(data, 1, MOST_BYTES, file)};
  fclose(file);
}

static void read_seeds(const char *folder)
{
  struct dirent **names;
  int count = scandir(folder, &names, NULL, compare_names);
  for (int i = 0; i < count; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
    if (names[i]->d_name[0] != '.' && seed_count < MOST_SEEDS)
      read_seed(path);
    free(names[i]);
  }
  if (count >= 0)
    free(names);
}

static size_t insert_bytes(uint8_t *data, size_t size, size_t at, const uint8_t *from, size_t count)
{
  if (count > MOST_BYTES - size)
    count = MOST_BYTES - size;
  memmove(data + at + count, data + at, size - at);
  memcpy(data + at, from, count);
  return size + count;
}

static size_t change(uint8_t *data, size_t size)
{
  static const char opcodes[] = "()]}NNK1l2tdaesu0h\x01q\x01\x85\x86\x87\x94\x94\x80\x95.";
  uint8_t copy[256];
  size_t at = draw(size + 1), left = size - at;
  const input *other = &seeds[draw(seed_count)];
  switch (draw(6)) {
  case 0: /* another byte */
    if (left)
      data[at] = (uint8_t)draw(256);
    return size;
  case 1: /* another opcode */
    if (left)
      data[at] = (uint8_t)opcodes[draw(sizeof opcodes - 1)];
    return size;
  case 2: /* one more opcode */
    copy[0] = (uint8_t)opcodes[draw(sizeof opcodes - 1)];
    return insert_bytes(data, size, at, copy, 1);
  case 3: { /* a stretch out */
    size_t count = left ? draw(left < 16 ? left + 1 : 16) : 0;
    memmove(data + at, data + at + count, left - count);
    return size - count;
  }
  case 4: { /* a stretch again and again, which makes depth */
    size_t count = draw(left < 8 ? left + 1 : 8);
    memcpy(copy, data + at, count);
    for (size_t times = draw(128); times > 0; times--)
      size = insert_bytes(data, size, at, copy, count);
    return size;
  }
  default: { /* a stretch of another seed */
    size_t from = draw(other->size + 1), count = draw(other->size - from + 1);
    return insert_bytes(data, size, at, other->data + from, count < 256 ? count : 256);
  }
  }
}

static void run_changed(void)
{
  static uint8_t data[MOST_BYTES];
  const input *seed = &seeds[draw(seed_count)];
  size_t size = seed->size;
  memcpy(data, seed->data, size);
  for (uint64_t changes = 1 + draw(6); changes > 0; changes--)
    size = change(data, size);
  run_bytes(data, size);
}

int main(int count, char **arguments)
{
  uint64_t runs = UINT64_MAX, seed = (uint64_t)time(NULL);
  long long seconds = 0;
  for (int i = 1; i < count; i++) {
    unsigned long long number = 0;
    if (sscanf(arguments[i], "-runs=%llu", &number) == 1)
      runs = number;
    else if (sscanf(arguments[i], "-seed=%llu", &number) == 1)
      seed = number;
    else if (sscanf(arguments[i], "-max_total_time=%llu", &number) == 1)
      seconds = (long long)number;
    else if (arguments[i][0] != '-')
      read_seeds(arguments[i]);
  }
  if (seed_count == 0) {
    fprintf(stderr, "name a folder with seeds\n");
    return 2;
  }
  printf("Seed: %llu\n", (unsigned long long)seed);
  state = 2 * seed + 1; /* never 0, where the numbers would stay */
  signal(SIGABRT, on_abort);
  signal(SIGSEGV, on_abort);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_set_death_callback(keep_running);
#endif
  for (size_t i = 0; i < seed_count; i++)
    run_bytes(seeds[i].data, seeds[i].size);
  time_t end = time(NULL) + seconds;
  uint64_t done = 0;
  while (done < runs && (seconds == 0 || time(NULL) < end)) {
    run_changed();
    done++;
  }
  for (size_t i = 0; i < seed_count; i++)
    free(seeds[i].data);
  printf("Done %llu runs\n", (unsigned long long)done);
  return 0;
}
