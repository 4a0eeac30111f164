/* How many instructions the hot path executes on the simulated device. The bounds are a few percent
 * above what gcc 12 needs, so that no change exceeds them unnoticed. Times depend on the machine,
 * but instructions almost only on the compiler. Assertions count, too, and so does the simulated
 * driver where it is called. Valgrind would count the same, but would have to be installed.
 *
 * A child executes each step, and the parent lets it go one instruction at a time between two
 * breakpoints. Only in the variant `counted`, without the checker of locks, and where processes may
 * be traced like that. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdbool.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "one_world.h"

#if defined(__x86_64__) && defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(ESPER_LOCK_ORDER)
#define IS_COUNTED 1
#else
#define IS_COUNTED 0
#endif

#if IS_COUNTED

enum { WARM_UP = 200, TIMES = 20, CANNOT_TRACE = 77 };

#define BREAKPOINT() __asm__ volatile("int3" ::: "memory")

static void *kept[64];

/* ---- what is counted ------------------------------------------------------- */

static void nothing(void)
{
}

static void pair(esper_stream stream, size_t size)
{
  void *p;
  if (esper_malloc(w.core, size, stream, &p) == ESPER_OK)
    esper_free(w.core, p);
}

static void pair_of_512_bytes(void)
{
  pair((esper_stream){0}, 512);
}
static void pair_of_64_mib(void)
{
  pair((esper_stream){0}, 64 * MIB);
}
static void pair_on_another_stream(void)
{
  pair(w.stream[0], 1 * MIB);
}

/* A batch after the other, as a loop over tensors makes them. */
static void pair_of_a_batch(void)
{
  static int turn;
  void **place = &kept[turn++ % 64];
  if (*place)
    esper_free(w.core, *place);
  esper_malloc(w.core, 300 * KIB, (esper_stream){0}, place);
}

/* Always another size, which no block cache has. */
static void pair_that_misses(void)
{
  static size_t size;
  size = size % (8 * MIB) + 1 * MIB + 512;
  pair((esper_stream){0}, size);
}

/* Frees one of many blocks and asks for another size in its place, so blocks are split and merged.
 * Sizes are 512 B to 64 KiB, each power of two as likely. */
enum { LIVE = 1000 };
static void *among[LIVE];
static uint64_t draws = 1;

static size_t draw(size_t below)
{
  draws = draws * 6364136223846793005u + 1442695040888963407u;
  return (size_t)(draws >> 33) % below;
}

static void replace(void **place)
{
  const size_t least = (size_t)512 << draw(7);
  if (*place)
    esper_free(w.core, *place);
  esper_malloc(w.core, least + draw(least), (esper_stream){0}, place);
}

static void fill(void)
{
  for (int i = 0; i < LIVE; i++)
    replace(&among[i]);
}

static void replace_one(void)
{
  replace(&among[draw(LIVE)]);
}

static void marked_pair(void)
{
  void *p;
  if (esper_malloc(w.core, 1 * MIB, w.stream[0], &p) != ESPER_OK)
    return;
  const void *pointer = p;
  esper_record_use(w.core, &pointer, 1, w.stream[1], 0, NULL);
  esper_free(w.core, p);
}

/* What w.stream[2] reads, which waits for a flag. */
static void make_pending(bool marked)
{
  enum { MANY = 1000 };
  static void *blocks[MANY];
  sim_wait_flag(w.s, 0, w.stream[2].handle, 1);
  for (int i = 0; i < MANY; i++)
    blocks[i] = world_malloc(&w, 64 * KIB, w.stream[3]);
  for (int i = 0; i < MANY; i++) {
    if (marked)
      world_use(&w, blocks[i], w.stream[2], 0);
    else
      world_record_stream(&w, blocks[i], w.stream[2]);
    world_free(&w, blocks[i]);
  }
}

static void hold_up(void)
{
  make_pending(false);
}
static void mark_and_free(void)
{
  make_pending(true);
}

/* Nothing is free but what no stream may be made to wait for. */
static void malloc_beside_pending(void)
{
  void *p;
  esper_malloc(w.core, 64 * KIB, w.stream[3], &p);
}

/* The same while events of a stream complete that has nothing to do with them. */
static void malloc_beside_news(void)
{
  const void *live = kept[0];
  esper_record_use(w.core, &live, 1, w.stream[5], 0, NULL);
  esper_retire(w.core, 0);
  malloc_beside_pending();
}

static void keep_one(void)
{
  kept[0] = world_malloc(&w, 1 * MIB, w.stream[4]);
}

static void hold_up_and_keep_one(void)
{
  keep_one();
  hold_up();
}

/* As an observer makes them for every operator. */
static void note_on_own_stream(void)
{
  esper_note_use(w.core, (const void *[]){kept[0]}, 1, w.stream[4]);
}
static void note_three(void)
{
  esper_note_use(w.core, (const void *[]){kept[0], kept[0], kept[0]}, 3, w.stream[4]);
}
static void note_once_more(void)
{
  esper_note_use(w.core, (const void *[]){kept[0]}, 1, w.stream[5]);
}

static const struct step {
  const char *name;
  void (*run)(void);
  long most;            /* instructions */
  void (*before)(void); /* what it finds */
} STEPS[] = {
    {"a malloc and free of 512 B", pair_of_512_bytes, 456, NULL},
    {"a malloc and free of 64 MiB", pair_of_64_mib, 465, NULL},
    {"a malloc and free on another stream", pair_on_another_stream, 705, NULL},
    {"a malloc and free in a batch of 64", pair_of_a_batch, 475, NULL},
    {"a malloc and free of a new size", pair_that_misses, 1865, NULL},
    {"a free and malloc among 1,000 live blocks", replace_one, 1640, fill},
    {"a malloc, a mark on another stream and a free", marked_pair, 4720, NULL},
    {"a malloc beside 1,000 blocks that are held up", malloc_beside_pending, 2215, hold_up},
    {"the same, a mark on another stream and its end", malloc_beside_news, 5300,
     hold_up_and_keep_one},
    {"a malloc beside 1,000 blocks, one marked and freed", malloc_beside_pending, 4070,
     mark_and_free},
    {"a note on the block's own stream", note_on_own_stream, 180, keep_one},
    {"three notes on their own stream", note_three, 300, keep_one},
    {"a note that was made before", note_once_more, 190, keep_one},
};

/* ---- counting --------------------------------------------------------------- */

static _Noreturn void child(void (*run)(void), void (*before)(void))
{
  if (before)
    before();
  if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
    _exit(CANNOT_TRACE);
  for (int i = 0; i < WARM_UP; i++)
    run();
  BREAKPOINT();
  for (int i = 0; i < TIMES; i++)
    run();
  BREAKPOINT();
  _exit(0);
}

/* Stopped by a breakpoint, not by a step that ended, be it that of a system call. */
static bool at_breakpoint(pid_t pid)
{
  siginfo_t info;
  return !ptrace(PTRACE_GETSIGINFO, pid, NULL, &info) && info.si_signo == SIGTRAP &&
         info.si_code == SI_KERNEL;
}

/* Instructions between the breakpoints; -1: it cannot be traced here. */
static long count(void (*run)(void), void (*before)(void))
{
  int status;
  long steps = 0;
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (!pid)
    child(run, before);
  CHECK(waitpid(pid, &status, 0) == pid);
  if (WIFEXITED(status) && WEXITSTATUS(status) == CANNOT_TRACE)
    return -1;
  CHECK(WIFSTOPPED(status) && at_breakpoint(pid));
  do {
    CHECK(!ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL));
    CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
    steps++;
  } while (!at_breakpoint(pid));
  CHECK(!ptrace(PTRACE_CONT, pid, NULL, NULL));
  CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
  return steps;
}

static void count_all(void)
{
  world_begin_with(&w, &(sim_options){.completion = SIM_AT_ONCE}, NULL);
  long loop = count(nothing, NULL);
  if (loop < 0)
    printf("skipped: processes may not be traced here\n");
  for (size_t i = 0; loop >= 0 && i < sizeof STEPS / sizeof *STEPS; i++) {
    long each = (count(STEPS[i].run, STEPS[i].before) - loop) / TIMES;
    printf("%s: %ld instructions, at most %ld\n", STEPS[i].name, each, STEPS[i].most);
    CHECK(each > 20);
    CHECK(each <= STEPS[i].most);
  }
  world_end(&w);
}

#endif

TEST(the_hot_path_executes_so_many_instructions)
{
#if IS_COUNTED
  count_all();
#else
  printf("skipped: counted in the plain build, on x86-64\n");
#endif
}
