/* esper_alloc.h: the public C interface of esper_alloc, a device memory allocator that knows every
 * use of memory on another stream. Valid C11 and C++. Includes neither CUDA nor PyTorch.
 *
 * There are two groups of functions:
 *   esper_alloc_*  work on the one allocator of this process: GPU memory through the CUDA
 *                  driver. Extensions call these.
 *   esper_*        take an `esper_core *`. Several cores can exist side by side, each over
 *                  its own driver (see device/device.h). The PyTorch shim, the replay tool
 *                  and the tests use these.
 *
 * Every function may be called from any thread at any time unless its comment says otherwise. None
 * throws, exits or prints. A function that returns a status changes nothing when the status is not
 * ESPER_OK, and esper_last_error() then gives the calling thread the reason in words. */
#ifndef ESPER_ALLOC_H
#define ESPER_ALLOC_H

#include <stddef.h>
#include <stdint.h>

#include "esper_report.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ESPER_API __attribute__((visibility("default")))
#else
#define ESPER_API
#endif

typedef enum esper_status {
  ESPER_OK = 0,
  ESPER_NOT_READY,     /* an event has not completed (from a driver) */
  ESPER_OUT_OF_MEMORY, /* the device, or the memory fraction, is exhausted */
  ESPER_INVALID,       /* the caller's mistake, such as a second free */
  ESPER_CAPTURING,     /* refused because a stream is being captured */
  ESPER_UNSUPPORTED,   /* the driver does not have this function */
  ESPER_HOST_MEMORY,   /* no host memory for metadata */
  ESPER_DEVICE_ERROR,  /* the driver failed; later calls may fail, too */
  ESPER_SHUT_DOWN,     /* the driver is shutting down: the process exits */
  ESPER_REJECTED,      /* reserved memory would pass rejection_share */
  ESPER_ASLEEP         /* refused because memory sleeps: esper_sleep.h */
} esper_status;

/* "ESPER_OUT_OF_MEMORY" and so on. Never NULL. */
ESPER_API const char *esper_status_name(esper_status status);

/* Why the calling thread's last unsuccessful call failed, as a sentence. Never NULL; overwritten by
 * the thread's next unsuccessful call. */
ESPER_API const char *esper_last_error(void);

/* ------------------------------------------------------------------------
 * The allocator of this process
 * ---------------------------------------------------------------------- */

/* Allocates device memory for `stream` (a cudaStream_t or CUstream) of CUDA device `device`.
 * Returns NULL for zero bytes, an invalid device or exhausted memory.
 * torch.cuda.memory.CUDAPluggableAllocator expects this signature. */
ESPER_API void *esper_alloc_malloc(size_t size, int device, void *stream);

/* Frees memory. `size` is ignored; `stream` is the stream of the allocation. The bare
 * CUDAPluggableAllocator does not report record_stream. The free is then ordered after all work
 * enqueued on the device so far; see esper_alloc_set_record_stream_visible. */
ESPER_API void esper_alloc_free(void *ptr, size_t size, int device, void *stream);

/* Marks the end of a use of `ptr` (any address in the allocation) on `stream`. Call it right after
 * enqueuing the last access there. */
ESPER_API esper_status esper_alloc_record_use(const void *ptr, void *stream);

/* The imprecise form: the use on `stream` ends when the memory is freed. */
ESPER_API void esper_alloc_record_stream(void *ptr, void *stream);

/* The same for work that automatic uses do not see, such as a kernel that is launched outside
 * PyTorch's operators. May come before or after the work is enqueued. Cheap if `ptr` is the first
 * address and the use is known already. Addresses outside the allocations are skipped. */
ESPER_API esper_status esper_alloc_touch(const void *ptr, void *stream);

/* Further hooks, with the signatures that CUDAPluggableAllocator's setters expect. */
ESPER_API void esper_alloc_init(int device_count);
ESPER_API void esper_alloc_reset(void);
ESPER_API void esper_alloc_set_memory_fraction(double fraction, int device);
ESPER_API void *esper_alloc_base(void *ptr, size_t *size);

/* Says whether the embedder forwards record_stream (1) or may not do so (0, the default). While it
 * is 0, esper_alloc_free waits for every stream of the device. */
ESPER_API void esper_alloc_set_record_stream_visible(int visible);

/* Tells the black box what a thread executes that runs no Python, such as an autograd node: a hash,
 * and if `name` is not NULL a name in at most `size` bytes. `node` returns 0 for nothing. */
ESPER_API void esper_alloc_find_nodes(int (*node)(uint64_t *hash, char *name, size_t size));

/* To be called when memory has run out: writes the black box, if a file is named for that. Returns
 * its name, or NULL. */
ESPER_API const char *esper_alloc_note_oom(void);

/* ------------------------------------------------------------------------
 * Cores
 * ---------------------------------------------------------------------- */

typedef struct esper_core esper_core;
typedef struct esper_pool esper_pool;
struct esper_driver; /* device/device.h */

/* A stream as the caller presents it. `handle` is the driver's; 0 and 1 mean the device's legacy
 * default stream. A stream is mortal if it may be destroyed, or if its handle means another stream
 * in another thread. The handle of a mortal stream is used only during the call that presents
 * it. */
typedef struct esper_stream {
  void *handle;
  int device;
  unsigned flags; /* ESPER_STREAM_... */
} esper_stream;

enum {
  ESPER_STREAM_IMMORTAL = 1u /* lives as long as the process, as PyTorch's do */
};

/* Where memory comes from. One core may have segments of both kinds. */
typedef enum esper_segments {
  ESPER_SEGMENTS_AUTO = 0,    /* mapped where the device can, else classic. Always classic for pools
                                 made by esper_pool_create. */
  ESPER_SEGMENTS_CLASSIC = 1, /* each is one allocation of a fixed size */
  ESPER_SEGMENTS_MAPPED = 2   /* reserved addresses with pages where memory is needed; classic where
                                 the device cannot map pages */
} esper_segments;

enum { ESPER_ROUNDUP_STEPS = 16 };

#define ESPER_ALLOWANCE_OFF SIZE_MAX

/* Zero everywhere means the defaults. Sizes are in bytes. */
typedef struct esper_config {
  esper_segments segments;
  /* How many bytes of a stream's free memory, in one pool and of one size class, may wait for other
   * streams' work before malloc holds the host back: it waits for the oldest of that work, so that
   * memory need not grow. 0: 128 MiB. ESPER_ALLOWANCE_OFF: the host is never held back. */
  size_t allowance;
  size_t max_split_size;         /* of classic segments. 0: unlimited */
  size_t max_non_split_rounding; /* 0: 20 MiB */
  size_t large_segment_size;     /* also of pages. 0: 20 MiB, and pages as in grow.c */
  /* Into how many steps each power of two is divided when a size is rounded up. Entry i is for
   * sizes in [1 MiB << i, 1 MiB << (i + 1)). Entry 0 is also for smaller sizes, the last for larger
   * ones. 0 and 1: no rounding. */
  size_t roundup_power2_divisions[ESPER_ROUNDUP_STEPS];
  /* A share, below 1, of the device's memory. A request is rejected with ESPER_REJECTED at once if
   * reserved memory would have to pass this share. The allocator then gives no memory back, and
   * waits only as far as it is held back. 0: no request is rejected. */
  double rejection_share;
  /* Called by malloc, with no lock held, before memory grows, and again if it cannot, then with
   * `short_of_memory`. It frees what it can and returns nonzero if it freed anything; malloc then
   * tries again. Before growth it is not called in a capture, for memory with a fence, or where a
   * stream has borrowed too often; and never for a malloc of its own. May be NULL. */
  int (*free_memory)(void *context, int short_of_memory);
  void *free_memory_context;
  /* Called, with no lock held, when a malloc is about to wait. It calls wait(argument), which
   * waits, and may give up locks of its own meanwhile, such as a language's global lock. NULL:
   * the core waits without it. */
  void (*while_waiting)(void (*wait)(void *argument), void *argument);
  /* Called, with no lock held, with what the user should know although it is no error. Each text is
   * reported once. Must not call the core. May be NULL. */
  void (*warn)(void *context, const char *text);
  void *warn_context;
  /* Nonzero: the embedder announces every capture that uses pools with esper_capture_begin. Zero:
   * whenever allocations go to a pool, a capture may be in progress. */
  int captures_are_announced;
} esper_config;

/* Makes a core over `driver`, which must outlive it. `config` may be NULL. */
ESPER_API esper_status esper_core_create(const struct esper_driver *driver,
                                         const esper_config *config, esper_core **core);

/* Gives all memory back to the driver, live blocks included. It first waits for all work on the
 * devices, as long as something completes. Where that would end a capture, it does not wait, and
 * the caller must have. No other thread may be using the core. */
ESPER_API void esper_core_destroy(esper_core *core);

ESPER_API int esper_device_count(const esper_core *core);

/* ------------------------------------------------------------------------
 * Memory
 * ---------------------------------------------------------------------- */

/* Allocates `size` bytes for `stream` from the default pool, or from `pool`. Zero bytes: *ptr is
 * NULL. After ESPER_OUT_OF_MEMORY, esper_get_failure() has the figures. */
ESPER_API esper_status esper_malloc(esper_core *core, size_t size, esper_stream stream, void **ptr);
ESPER_API esper_status esper_malloc_from(esper_core *core, esper_pool *pool, size_t size,
                                         esper_stream stream, void **ptr);

/* Frees `ptr`. It waits for nothing and needs no memory. NULL is allowed. ESPER_INVALID: `ptr` is
 * not the start of a live block of this core. */
ESPER_API esper_status esper_free(esper_core *core, void *ptr);

enum {
  /* The use ends with everything enqueued on the stream by the time of the free, as by
   * esper_record_stream, because the stream may read the memory again. */
  ESPER_USE_UNTIL_FREE = 1u
};

/* Marks the end of a use of `count` allocations on `stream`, with one event. Any address inside an
 * allocation stands for it. Addresses outside this core's allocations are skipped. *marked (may be
 * NULL) becomes the number of allocations found. On a block's own stream a mark does nothing. If no
 * event can be recorded, the block is held; the caller gets no error for that. ESPER_INVALID: there
 * is no such flag. ESPER_HOST_MEMORY: possibly only some were marked. */
ESPER_API esper_status esper_record_use(esper_core *core, const void *const *ptrs, size_t count,
                                        esper_stream stream, unsigned flags, size_t *marked);

/* As esper_record_use, with an event recorded already on a stream of `device`. The event may be
 * recorded again or destroyed as soon as this returns. */
ESPER_API esper_status esper_record_use_event(esper_core *core, const void *const *ptrs,
                                              size_t count, void *event, int device,
                                              size_t *marked);

/* Adds a use on `stream` that ends with everything enqueued there by the time of the free. If the
 * stream is being captured and the memory is not of that capture, the use ends with everything on
 * all streams of all devices, because the graph may be replayed on any of them. ESPER_INVALID:
 * `ptr` is not within a live block of this core. */
ESPER_API esper_status esper_record_stream(esper_core *core, const void *ptr, esper_stream stream);

/* For embedders that observe what is used: the same for `count` addresses, before or after the work
 * is enqueued, as long as they are live. Takes no lock for the first address of a block that is the
 * stream's own, or has such a use already. Memory from outside the capture that the stream is in
 * counts as used, even if it is the stream's own. Addresses outside the live blocks are skipped.
 * The status is that of the first address that could not be noted; the others are noted all the
 * same. */
ESPER_API esper_status esper_note_use(esper_core *core, const void *const *ptrs, size_t count,
                                      esper_stream stream);

/* Makes the later free of all memory that is live now wait for everything enqueued by then on any
 * stream of the devices that have memory, and of their peers (esper_add_peer). For embedders that
 * begin to observe: streams may have been used before. ESPER_HOST_MEMORY: possibly only some of it
 * will wait. */
ESPER_API esper_status esper_note_unseen_uses(esper_core *core);

/* Makes the later free of `ptr` wait for everything enqueued on any stream of its device by then.
 * For embedders that do not report who reads the memory. */
ESPER_API esper_status esper_free_after_all(esper_core *core, void *ptr);

/* Finds out which uses have completed. malloc does so when it needs to; this does it now. */
ESPER_API void esper_retire(esper_core *core, int device);

/* Gives free memory back to the driver: wholly free segments, and pages. Waits for the device
 * first, as long as something completes there, unless one of its streams is being captured.
 * `pool` NULL: all pools. Some memory stays: what a graph may still touch, and what is in a
 * private pool that has references. Memory of the default pool stays while a capture is in
 * progress, as far as the core was told (captures_are_announced). */
ESPER_API esper_status esper_empty_cache(esper_core *core, int device, esper_pool *pool);

/* A fence, to find accesses to memory that is not there any more. While it is on, memory of the
 * default pools that is asked for outside captures gets pages of its own, and lies at their end.
 * After the free, as soon as an allocation or a free finds that all that the memory owes is over,
 * the pages are unmapped, so that an access faults. Their addresses are not used again until very
 * many others have been: esper_fence_rounds() says how often they have come round.
 * ESPER_UNSUPPORTED: a device cannot map pages. */
ESPER_API esper_status esper_fence(esper_core *core, int on);
ESPER_API uint64_t esper_fence_rounds(esper_core *core);

/* ------------------------------------------------------------------------
 * Pools
 * ---------------------------------------------------------------------- */

/* Memory of one pool never serves another. A pool is known by its device and an id of two numbers,
 * which snapshots show; (0, 0) is the default pool. A pool lives while it has references or live
 * memory. Afterwards its memory goes back with the next esper_empty_cache or when memory runs
 * short. */

/* Adds a reference to the pool. Makes the pool if it does not exist. */
ESPER_API esper_status esper_pool_create(esper_core *core, int device, uint64_t id_first,
                                         uint64_t id_second, esper_pool **pool);

/* Whether memory that the calling thread wants for `stream` (the driver's handle) comes from the
 * pool. 0: no; 1: yes; -1: unknown, and the malloc fails. Called with no lock held; must not call
 * the core. */
typedef int esper_pool_filter(void *context, void *stream);

/* From now on requests that `filter` claims are served from the pool. The pool is made if it does
 * not exist, and gets a reference. The filter of the pool that was begun last is asked first. The
 * pool is quiesced: the host waits until memory freed to the pool owes nothing, so that a capture
 * that begins now may have it. A stream that is being captured is not waited for, and what it freed
 * is skipped. ESPER_INVALID: there is no filter, the pool was already begun, or too many pools
 * are. */
ESPER_API esper_status esper_pool_begin(esper_core *core, int device, uint64_t id_first,
                                        uint64_t id_second, esper_pool_filter *filter,
                                        void *context);

/* Ends that. When this returns, no thread calls the filter any more. *context (may be NULL) becomes
 * what was given to esper_pool_begin. The reference stays. */
ESPER_API esper_status esper_pool_end(esper_core *core, int device, uint64_t id_first,
                                      uint64_t id_second, void **context);

/* A capture begins on a stream of the device, or has ended, successfully or not. The core asks the
 * driver anyway whether streams are captured that it has met. Meanwhile it keeps the default pool's
 * cached memory in place, and records no event for all streams, which would end the capture of a
 * stream that it has not met. ESPER_INVALID at the end: no capture was announced. */
ESPER_API esper_status esper_capture_begin(esper_core *core, int device);
ESPER_API esper_status esper_capture_end(esper_core *core, int device);

/* Drops a reference. When the last one goes, the graphs that used the pool are assumed to be
 * gone. */
ESPER_API esper_status esper_pool_release(esper_core *core, int device, uint64_t id_first,
                                          uint64_t id_second);

enum {
  /* When memory is short, requests for the default pool may have free memory of this one, unless
   * graphs were captured into it. */
  ESPER_POOL_USE_ON_OOM = 1u,
  ESPER_POOL_NO_SPLIT = 2u /* each request gets a whole segment */
};

/* Replaces those flags of the pool that are in `which`. ESPER_INVALID: there is no such pool or
 * flag. */
ESPER_API esper_status esper_pool_set_flags(esper_core *core, int device, uint64_t id_first,
                                            uint64_t id_second, unsigned which, unsigned flags);

/* An allocator that provides a pool's segments. Called with no lock held, from any thread. Must not
 * ask the core for memory of that pool. */
typedef struct esper_source {
  /* Obtains `size` bytes on `device` at a multiple of 512. ESPER_OUT_OF_MEMORY: there is not
   * enough. Any other error makes the malloc fail. */
  esper_status (*obtain)(void *context, int device, size_t size, void **address);
  /* Takes memory back. No stream uses it any more. */
  void (*give_back)(void *context, int device, void *address, size_t size);
  /* Called when the pool is gone. May be NULL. */
  void (*drop)(void *context);
  void *context;
} esper_source;

/* Gives a new pool its allocator. ESPER_INVALID: the pool already has memory or an allocator. */
ESPER_API esper_status esper_pool_set_source(esper_core *core, int device, uint64_t id_first,
                                             uint64_t id_second, const esper_source *source);

/* The number of references to a private pool; 0 if there is no such pool. */
ESPER_API int esper_pool_use_count(esper_core *core, int device, uint64_t id_first,
                                   uint64_t id_second);

/* Whether the pool's live blocks are exactly those that begin at these addresses. ESPER_INVALID:
 * there is no such pool with references. */
ESPER_API esper_status esper_pool_live_are(esper_core *core, int device, uint64_t id_first,
                                           uint64_t id_second, const void *const *ptrs,
                                           size_t count, int *same);

/* Does esper_empty_cache for the pool with that id, if it exists. */
ESPER_API esper_status esper_pool_empty(esper_core *core, int device, uint64_t id_first,
                                        uint64_t id_second);

/* ------------------------------------------------------------------------
 * Checkpoints of a pool
 * ---------------------------------------------------------------------- */

/* PyTorch's graph trees capture several graphs into one pool. Replays use the pool's memory without
 * calling the allocator. Before the tree records again, it restores which blocks were live when the
 * last replayed graph had been recorded. */
typedef struct esper_checkpoint esper_checkpoint;

/* Notes the address, the size and the state of the pool's blocks. From now on all of the pool's
 * memory is kept until the last reference to the pool is gone. ESPER_INVALID: there is no such pool
 * with references. */
ESPER_API esper_status esper_checkpoint_take(esper_core *core, int device, uint64_t id_first,
                                             uint64_t id_second, esper_checkpoint **checkpoint);
/* NULL is allowed. May be called after the core is gone. */
ESPER_API void esper_checkpoint_free(esper_checkpoint *checkpoint);

/* What a restore did: which live blocks it freed, and which blocks it made live, perhaps at the
 * same addresses. Release both with free(freed), because `live` is a part of that array. */
typedef struct esper_checkpoint_delta {
  void **freed, **live;
  size_t freed_count, live_count;
} esper_checkpoint_delta;

/* Frees every live block of the pool, splits its memory as it was, and makes live again what was
 * live; the caller frees those blocks later. Every byte keeps what it owes. A use of a block that
 * is live again counts when that block is freed. Waits for calls that are working in the pool, but
 * not for the device. ESPER_INVALID: the pool or memory of the checkpoint is gone, or allocations
 * are going to the pool. */
ESPER_API esper_status esper_checkpoint_restore(esper_core *core,
                                                const esper_checkpoint *checkpoint,
                                                esper_checkpoint_delta *delta);

/* ------------------------------------------------------------------------
 * Limits and figures
 * ---------------------------------------------------------------------- */

/* Limits what may be reserved from now on to a `fraction`, in [0, 1], of the device's memory. 1
 * means no limit. With 0 only memory that is already reserved is handed out. */
ESPER_API esper_status esper_set_memory_fraction(esper_core *core, int device, double fraction);
ESPER_API double esper_get_memory_fraction(const esper_core *core, int device);

/* Replaces the whole configuration, functions included. */
ESPER_API esper_status esper_configure(esper_core *core, const esper_config *config);
ESPER_API void esper_get_config(const esper_core *core, esper_config *config);

/* Retires events first, so that memory whose uses have completed does not count as active. */
ESPER_API esper_status esper_get_stats(esper_core *core, int device, esper_stats *stats);
ESPER_API esper_status esper_reset_peak_stats(esper_core *core, int device);
ESPER_API esper_status esper_reset_accumulated_stats(esper_core *core, int device);

/* Copies the figures of the device's private pools into *pools (freed with free()), oldest pool
 * first, without those that are all zero. *count becomes their number. */
ESPER_API esper_status esper_get_pool_stats(esper_core *core, int device, esper_pool_stats **pools,
                                            size_t *count);

ESPER_API esper_status esper_get_counters(esper_core *core, int device, esper_counters *counters);

/* How often the core has called each function of the driver. Calls that threads make at the same
 * moment may be missed. esper_driver_call_name(i) counts from 0 and is NULL past the last. */
ESPER_API const char *esper_driver_call_name(int call);
ESPER_API uint64_t esper_driver_calls(const esper_core *core, int call);

/* Why the calling thread's last malloc failed. */
ESPER_API void esper_get_failure(esper_failure *failure);

/* Device memory as the driver reports it, in bytes. */
ESPER_API esper_status esper_memory_info(esper_core *core, int device, size_t *free, size_t *total);

/* The largest block that a malloc could get: the largest free block in the cache of any pool,
 * private ones included, or what the device still has within the memory fraction, whichever is
 * more. */
ESPER_API esper_status esper_largest_available(esper_core *core, int device, size_t *bytes);

/* A live block. */
typedef struct esper_block_info {
  void *address;
  size_t size;      /* as handed out, rounded up */
  size_t requested; /* as requested */
  int device;
  int live;     /* 0 after an error */
  void *stream; /* handle of the stream that it was last handed out on */
  void *segment_address;
  size_t segment_size; /* of a mapped segment: all its addresses */
  int mapped;          /* it is in a mapped segment: see esper_share() */
  int fenced;          /* it has a fence: see esper_fence() */
  uint64_t pool[2];    /* id of its pool; 0, 0: the default pool */
  int asleep;          /* some of it sleeps: see esper_sleep() */
} esper_block_info;
/* Finds the live block around an address. ESPER_INVALID: there is none. */
ESPER_API esper_status esper_find_block(esper_core *core, const void *ptr, esper_block_info *info);

/* Lets kernels and copies of `peer` access the pages of `device`, present and future. This cannot
 * be undone. For classic segments cudaDeviceEnablePeerAccess does the same; both may be called, in
 * any order. ESPER_INVALID: there is no such device, or the two are the same. ESPER_UNSUPPORTED:
 * one device cannot reach the other. After any error the peer may use none of the memory. */
ESPER_API esper_status esper_add_peer(esper_core *core, int device, int peer);

/* The memory around the live block that contains `ptr`: its segment, or in a mapped segment the
 * contiguous addresses that have pages. Slower than esper_find_block(). */
ESPER_API esper_status esper_find_base(esper_core *core, const void *ptr, void **address,
                                       size_t *size);

/* The name of a page of a mapped segment. It means the same in every process of this user on this
 * machine. Whoever knows the name may open the page, so give it to nobody else. */
typedef struct esper_page_name {
  uint64_t process, key; /* the offering process */
  uint64_t number;       /* a random number of the offer */
  uint64_t size;         /* bytes of the page */
} esper_page_name;

/* Names the pages under the live block that contains `ptr`, from its first to its last. *pages
 * (freed with free()) becomes an array of *count names; the first page is mapped at *address in
 * this process. From now on these pages neither move nor go back to the driver, whatever becomes of
 * their blocks. Free memory on them is still handed out. ESPER_INVALID: `ptr` is in no live block
 * of a mapped segment. ESPER_UNSUPPORTED: pages of this device cannot be shared. */
ESPER_API esper_status esper_share(esper_core *core, const void *ptr, void **address,
                                   esper_page_name **pages, size_t *count);

/* Ends that for all pages without live blocks, and returns their number. Nobody can open them by
 * their names any more. A process that has one open keeps the memory, but not its contents. */
ESPER_API size_t esper_unshare(esper_core *core);

/* Maps named pages of this or another process, one after the other, for `device` and its peers.
 * *address is where they begin. The memory lives until both sides are done with it. ESPER_INVALID:
 * the names make no sense, or nobody offers the pages any more. */
ESPER_API esper_status esper_open_shared(esper_core *core, int device, const esper_page_name *pages,
                                         size_t count, void **address);

/* Unmaps them once the work that is now on the device and its peers is done. That is at once, or
 * in a later call of these two or of esper_empty_cache(), if a capture goes on or the work does not
 * end soon.
 * ESPER_INVALID: no opened pages begin there. */
ESPER_API esper_status esper_close_shared(esper_core *core, void *address);

/* Pins the segment around `ptr`, for example because another process knows its address and may go
 * on using it after the memory was freed here. A pinned segment never goes back to the driver; its
 * memory is handed out as before. *segment (may be NULL) becomes its first address. ESPER_INVALID:
 * `ptr` is in no live block. ESPER_ASLEEP: memory of the segment sleeps. */
ESPER_API esper_status esper_pin(esper_core *core, const void *ptr, void **segment);

/* Ends that. ESPER_INVALID: no pinned segment begins there. ESPER_NOT_READY: it has a live block,
 * whose address somebody may still be given; it stays pinned. */
ESPER_API esper_status esper_unpin(esper_core *core, void *segment);

/* ------------------------------------------------------------------------
 * Snapshot and trace
 * ---------------------------------------------------------------------- */

/* Takes a consistent picture of a device (-1: of all, each consistent in itself). */
ESPER_API esper_status esper_snapshot_take(esper_core *core, int device, esper_snapshot *snapshot);
ESPER_API void esper_snapshot_free(esper_snapshot *snapshot);

/* Called for every action of a device as it happens, under that device's lock. It must neither call
 * the core nor wait for a thread that might. */
typedef void esper_trace_watch_fn(void *context, const esper_trace_entry *entry);

/* From now on `watch` is called; NULL: none is. When this returns,
 * no thread is inside the previous one. */
ESPER_API void esper_trace_watch(esper_core *core, esper_trace_watch_fn *watch, void *context);

/* Begins to record what happens in a core, as ESPER_ALLOC_BLACK_BOX says. The core of the
 * process is recorded without it, and a process can record one. ESPER_INVALID: the variable is
 * no size. */
ESPER_API esper_status esper_alloc_black_box(esper_core *core);

/* Is told of the program's calls by the thread that makes them, without a lock of the core. */
typedef struct esper_recorder {
  void (*allocated)(const void *ptr, size_t size, esper_stream stream);
  void (*freed)(const void *ptr); /* before the free; perhaps nothing is allocated there */
  void (*used)(const void *ptr, esper_stream stream); /* a mark */
  /* Segments, shortage, PENDING and what follows, and what a restored checkpoint allocates and
   * frees. As a watch is called: under the device's lock. */
  void (*told)(const esper_trace_entry *entry);
} esper_recorder;

/* From now on the recorder is called; NULL: none is. It must exist as long as the core: a thread
 * may still be inside the previous one. Unlike a watch, it leaves the block caches open. */
ESPER_API void esper_record(esper_core *core, const esper_recorder *recorder);

/* ------------------------------------------------------------------------
 * Checking
 * ---------------------------------------------------------------------- */

/* Checks every structure; nonzero if all invariants hold. Slow: for tests. */
ESPER_API int esper_core_is_valid(esper_core *core);

#ifdef __cplusplus
}
#endif
#endif
