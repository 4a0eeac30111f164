/* esper_alloc.h: the public C interface of esper_alloc, a device memory
 * allocator in which every use of memory on another stream is known to the
 * allocator. Valid C11 and C++. Includes neither CUDA nor PyTorch.
 *
 * Two groups of functions:
 *   esper_alloc_*  work on the one allocator of this process (GPU memory
 *                  through the CUDA driver). This is what extensions call.
 *   esper_*        take an `esper_core *`. Several cores can exist side by
 *                  side, each over its own driver (see device/device.h); the
 *                  PyTorch shim, the replay tool and the tests use these.
 *
 * Every function may be called from any thread at any time unless it says
 * otherwise. None throws, exits or prints. Functions that return a status
 * leave everything as it was when the status is not ESPER_OK, and
 * esper_last_error() then says why, in words, for the calling thread. */
#ifndef ESPER_ALLOC_H
#define ESPER_ALLOC_H

#include <stddef.h>
#include <stdint.h>

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
  ESPER_NOT_READY,     /* an event has not completed (a driver's answer) */
  ESPER_OUT_OF_MEMORY, /* the device, or the memory fraction, is exhausted */
  ESPER_INVALID,       /* the caller's mistake: foreign pointer, second free */
  ESPER_CAPTURING,     /* refused because a stream is being captured */
  ESPER_UNSUPPORTED,   /* this driver lacks the function */
  ESPER_HOST_MEMORY,   /* no host memory for metadata */
  ESPER_DEVICE_ERROR,  /* the driver failed; the error may be sticky */
  ESPER_SHUT_DOWN,     /* the driver is going away: the process is exiting */
  ESPER_REJECTED       /* memory would have grown beyond rejection_share */
} esper_status;

/* "ESPER_OUT_OF_MEMORY" and so on. Never NULL. */
ESPER_API const char *esper_status_name(esper_status status);

/* What the calling thread's last unsuccessful call failed of, as a sentence.
 * Never NULL; overwritten by the thread's next unsuccessful call. */
ESPER_API const char *esper_last_error(void);

/* ------------------------------------------------------------------------
 * The allocator of this process
 * ---------------------------------------------------------------------- */

/* Device memory for `stream` (a cudaStream_t or CUstream) of CUDA device
 * `device`. Zero bytes, an invalid device and exhausted memory give NULL.
 * The signature is the one torch.cuda.memory.CUDAPluggableAllocator expects. */
ESPER_API void *esper_alloc_malloc(size_t size, int device, void *stream);

/* Gives memory back. `size` is ignored; `stream` is the stream of the
 * allocation. When the bare CUDAPluggableAllocator was used, record_stream
 * cannot be seen, so the free is ordered after all of the device's work
 * enqueued so far; see esper_alloc_set_record_stream_visible. */
ESPER_API void esper_alloc_free(void *ptr, size_t size, int device, void *stream);

/* Marks the end of use of `ptr` (any address within the allocation) on
 * `stream`: call it right after the last read was enqueued there. */
ESPER_API esper_status esper_alloc_record_use(const void *ptr, void *stream);

/* Imprecise form: the use on `stream` ends when the memory is freed. */
ESPER_API void esper_alloc_record_stream(void *ptr, void *stream);

/* Further hooks with the signatures of CUDAPluggableAllocator's setters. */
ESPER_API void esper_alloc_init(int device_count);
ESPER_API void esper_alloc_reset(void);
ESPER_API void esper_alloc_set_memory_fraction(double fraction, int device);
ESPER_API void *esper_alloc_base(void *ptr, size_t *size);

/* Says whether the embedder forwards record_stream to us (1) or may not (0,
 * the default). While 0, esper_alloc_free covers every stream of the device. */
ESPER_API void esper_alloc_set_record_stream_visible(int visible);

/* ------------------------------------------------------------------------
 * Cores
 * ---------------------------------------------------------------------- */

typedef struct esper_core esper_core;
typedef struct esper_pool esper_pool;
struct esper_driver; /* device/device.h */

/* A stream as its user presents it. `handle` is the driver's; 0 and 1 mean
 * the device's legacy default stream. Streams that may be destroyed, or whose
 * handle means another stream in another thread, are mortal: their handle is
 * used only during the call that presents it. */
typedef struct esper_stream {
  void *handle;
  int device;
  unsigned flags; /* ESPER_STREAM_... */
} esper_stream;

enum {
  ESPER_STREAM_IMMORTAL = 1u /* lives as long as the process (a pool stream) */
};

/* What malloc tries first when no free block is ready. */
typedef enum esper_reuse_order {
  ESPER_REUSE_GATE = 0, /* reuse pending memory: the GPU waits, not the host */
  ESPER_REUSE_GROW = 1, /* get more memory from the device */
  ESPER_REUSE_AUTO = 2  /* gate while the wait looks short, else grow */
} esper_reuse_order;

/* What is true of a stream's work, and cannot be seen from outside. */
enum {
  ESPER_TRAIT_RENDEZVOUS = 1u /* it may wait for work not yet enqueued, here or on
                                 another rank: no stream and no malloc ever waits
                                 for it. Memory that it uses comes back when its
                                 events have completed. */
};

/* Where memory comes from. Segments of both kinds may stand side by side. */
typedef enum esper_segments {
  ESPER_SEGMENTS_AUTO = 0,    /* mapped where the device can, else classic; classic
                                in pools made by esper_pool_create, and where
                                max_split_size or garbage_collection_threshold
                                is given, which mean nothing for mapped ones   */
  ESPER_SEGMENTS_CLASSIC = 1, /* one allocation each, of a fixed size */
  ESPER_SEGMENTS_MAPPED = 2   /* reserved addresses, with pages where they are
                                needed; classic ones where the device cannot   */
} esper_segments;

enum { ESPER_ROUNDUP_STEPS = 16 };

/* All zero means the defaults. Sizes are bytes. */
typedef struct esper_config {
  esper_reuse_order reuse_order;
  esper_segments segments;
  size_t max_split_size;         /* 0: unlimited */
  size_t max_non_split_rounding; /* 0: 20 MiB */
  size_t large_segment_size;     /* 0: 20 MiB, and pages of fitting sizes */
  /* Divisions of each power of two that a size is rounded up to: entry i is
   * for sizes in [1 MiB << i, 1 MiB << (i + 1)); entry 0 also below, the last
   * also above. 0 and 1: no rounding. */
  size_t roundup_power2_divisions[ESPER_ROUNDUP_STEPS];
  /* A share of the memory fraction's limit, below 1. Before more than that would
   * be reserved, large segments of the default pool that nobody uses go back to
   * the device, those first that were used last longest ago. 0, or no limit: they
   * stay until memory runs out. */
  double garbage_collection_threshold;
  /* A share of the device's memory, below 1. A request that would make the
   * reserved memory grow beyond it is rejected at once, with ESPER_REJECTED:
   * nothing is waited for and nothing given back for its sake. 0: none is. */
  double rejection_share;
  /* Called by malloc when memory ran out, with no lock held: free what can be
   * freed; nonzero: something was, try again. May be NULL. */
  int (*free_memory)(void *context);
  void *free_memory_context;
  /* Told, with no lock held, of what the program should know of and is no
   * error; each thing once. Must not call the core. May be NULL. */
  void (*warn)(void *context, const char *text);
  void *warn_context;
  /* Nonzero: every capture for which pools are begun is announced with
   * esper_capture_begin. Else one may be going on while allocations go to any pool. */
  int captures_are_announced;
} esper_config;

/* Makes a core over `driver`, which must outlive it. `config` may be NULL. */
ESPER_API esper_status esper_core_create(const struct esper_driver *driver,
                                         const esper_config *config, esper_core **core);

/* Gives all memory back to the driver, live blocks included. No other thread
 * may be using the core. */
ESPER_API void esper_core_destroy(esper_core *core);

ESPER_API int esper_device_count(const esper_core *core);

/* Replaces the traits (ESPER_TRAIT_...) of a stream, which start as none. They
 * hold for uses that were marked before, too. Take them back before a stream is
 * destroyed: nobody can ask it afterwards whether its work is done.
 * ESPER_INVALID: no such trait. */
ESPER_API esper_status esper_stream_set_traits(esper_core *core, esper_stream stream,
                                               unsigned traits);

/* ------------------------------------------------------------------------
 * Memory
 * ---------------------------------------------------------------------- */

/* `size` bytes for `stream`, from the default pool. Zero bytes: *ptr = NULL.
 * ESPER_OUT_OF_MEMORY: esper_get_failure() has the figures. */
ESPER_API esper_status esper_malloc(esper_core *core, size_t size, esper_stream stream, void **ptr);
ESPER_API esper_status esper_malloc_from(esper_core *core, esper_pool *pool, size_t size,
                                         esper_stream stream, void **ptr);

/* Gives `ptr` back. Waits for nothing and cannot run out of memory. NULL is
 * fine. ESPER_INVALID: not the start of a live block of this core. */
ESPER_API esper_status esper_free(esper_core *core, void *ptr);

enum {
  ESPER_USE_NO_GATE = 1u /* protect, but never let another stream wait for it:
                            the use may depend on work not yet enqueued       */
};

/* Marks the end of use of `count` allocations on `stream`, with one event.
 * Addresses inside an allocation stand for it; addresses of no allocation of
 * this core are skipped, and the number of those found is stored in *marked
 * (may be NULL). Nothing to do on a block's own stream. A use that could not
 * be recorded holds the block: that is not an error of the caller.
 * ESPER_HOST_MEMORY: some were marked perhaps, not all. */
ESPER_API esper_status esper_record_use(esper_core *core, const void *const *ptrs, size_t count,
                                        esper_stream stream, unsigned flags, size_t *marked);

/* The same with an event that was already recorded on a stream of `device`;
 * it may be recorded again or destroyed as soon as this returns. */
ESPER_API esper_status esper_record_use_event(esper_core *core, const void *const *ptrs,
                                              size_t count, void *event, int device, unsigned flags,
                                              size_t *marked);

/* A use on `stream` that ends with everything enqueued there by the time of
 * the free; if that is being captured and the memory is not of the capture, with
 * everything on any stream of its device by then, for the graph may be replayed
 * anywhere. ESPER_INVALID: not within a live block of this core. */
ESPER_API esper_status esper_record_stream(esper_core *core, const void *ptr, esper_stream stream);

/* Makes the free of `ptr`, when it comes, wait for all work that any stream
 * of its device has by then: for embedders that do not say who reads it. */
ESPER_API esper_status esper_free_after_all(esper_core *core, void *ptr);

/* Finds out which uses have completed. malloc does this when it must; call it
 * to have it done now. */
ESPER_API void esper_retire(esper_core *core, int device);

/* Gives every wholly free segment back to the device. Waits for the device,
 * unless a stream of it is being captured. `pool` NULL: all pools. Memory that
 * a graph may still touch stays, and so does a pool's while anybody refers to
 * it; the default pool's while a capture goes on, as far as the core was told
 * (captures_are_announced). */
ESPER_API esper_status esper_empty_cache(esper_core *core, int device, esper_pool *pool);

/* ------------------------------------------------------------------------
 * Pools
 * ---------------------------------------------------------------------- */

/* Memory of one pool never serves another. A pool is known by its device and
 * its id, two numbers, which snapshots show; (0, 0) is the default pool. It
 * lives as long as somebody refers to it or its memory is out; when neither is
 * so, its memory goes back with the next esper_empty_cache or when memory runs
 * short. Inside a capture, and with ESPER_REUSE_GATE in private pools outside any,
 * the choice of memory depends on the calls of a stream alone, not on what has
 * completed, so addresses repeat from run to run; docs/design.md says where not. */

/* Adds a reference to the pool, which is made if need be. */
ESPER_API esper_status esper_pool_create(esper_core *core, int device, uint64_t id_first,
                                         uint64_t id_second, esper_pool **pool);

/* Whether memory that the calling thread wants for `stream` (the driver's
 * handle) comes from the pool: 0 no, 1 yes, -1 cannot say, and the malloc
 * fails. Called with no lock held; must not call the core. */
typedef int esper_pool_filter(void *context, void *stream);

/* From now on memory that `filter` claims comes from the pool, which is made if
 * need be and gets a reference. Of several pools the one begun last is asked
 * first. The pool is sealed: the host waits until what was freed to it owes
 * nothing, so that a capture that begins now may have it; a stream that is
 * being captured is not waited for, and what it freed is passed over.
 * ESPER_INVALID: the pool has been begun and not ended; too many are. */
ESPER_API esper_status esper_pool_begin(esper_core *core, int device, uint64_t id_first,
                                        uint64_t id_second, esper_pool_filter *filter,
                                        void *context);

/* The filter is not asked any more, by no thread, when this returns; *context
 * (may be NULL) is what begin was given. The reference stays. */
ESPER_API esper_status esper_pool_end(esper_core *core, int device, uint64_t id_first,
                                      uint64_t id_second, void **context);

/* A capture begins on a stream of the device, or has ended there, well or not. What
 * a stream's work means is asked of the driver all the same: this only keeps the
 * default pool's cached memory where it is meanwhile. ESPER_INVALID, at the end: none
 * is known to go on. */
ESPER_API esper_status esper_capture_begin(esper_core *core, int device);
ESPER_API esper_status esper_capture_end(esper_core *core, int device);

/* Takes back a reference. With the last one the graphs that used the pool are
 * taken to be gone. */
ESPER_API esper_status esper_pool_release(esper_core *core, int device, uint64_t id_first,
                                          uint64_t id_second);

enum {
  /* When memory is short, a request for the default pool may have free memory of
     this one, unless graphs were captured into it. */
  ESPER_POOL_USE_ON_OOM = 1u,
  ESPER_POOL_NO_SPLIT = 2u /* a request gets a segment, whole */
};

/* Replaces the pool's flags that are in `which`. ESPER_INVALID: there is no such
 * pool, or no such flag. */
ESPER_API esper_status esper_pool_set_flags(esper_core *core, int device, uint64_t id_first,
                                            uint64_t id_second, unsigned which, unsigned flags);

/* An allocator that a pool's segments come from. Called with no lock held, from
 * any thread; must not call the core for memory of that pool. */
typedef struct esper_source {
  /* `size` bytes on `device`, which start at a multiple of 512 bytes.
   * ESPER_OUT_OF_MEMORY: there are none; another status fails the malloc. */
  esper_status (*obtain)(void *context, int device, size_t size, void **address);
  /* Nobody uses the memory any more, on any stream. */
  void (*give_back)(void *context, int device, void *address, size_t size);
  /* The pool is gone. May be NULL. */
  void (*drop)(void *context);
  void *context;
} esper_source;

/* For a pool that was just made. ESPER_INVALID: it has memory, or a source. */
ESPER_API esper_status esper_pool_set_source(esper_core *core, int device, uint64_t id_first,
                                             uint64_t id_second, const esper_source *source);

/* References to a private pool; 0 where there is none. */
ESPER_API int esper_pool_use_count(esper_core *core, int device, uint64_t id_first,
                                   uint64_t id_second);

/* Whether the pool's live blocks are those that begin at these addresses, and no
 * others. ESPER_INVALID: nobody refers to such a pool. */
ESPER_API esper_status esper_pool_live_are(esper_core *core, int device, uint64_t id_first,
                                           uint64_t id_second, const void *const *ptrs,
                                           size_t count, int *same);

/* esper_empty_cache for the pool with that id, if there is one. */
ESPER_API esper_status esper_pool_empty(esper_core *core, int device, uint64_t id_first,
                                        uint64_t id_second);

/* ------------------------------------------------------------------------
 * Checkpoints of a pool
 * ---------------------------------------------------------------------- */

/* A tree of graphs shares one pool. Between recordings its replays use the pool's
 * memory without the allocator; before it records again, it puts back which
 * blocks were live when the last replayed graph had been recorded. */
typedef struct esper_checkpoint esper_checkpoint;

/* Writes down the pool's blocks: where, how large, live or free. From now on all
 * of the pool's memory is kept until the last reference to the pool goes.
 * ESPER_INVALID: nobody refers to such a pool. */
ESPER_API esper_status esper_checkpoint_take(esper_core *core, int device, uint64_t id_first,
                                             uint64_t id_second, esper_checkpoint **checkpoint);
/* NULL is fine. May be called after the core is gone. */
ESPER_API void esper_checkpoint_free(esper_checkpoint *checkpoint);

/* What a restore did: live blocks that were freed, and blocks that are live since,
 * maybe at the same addresses. Freed with free(freed); `live` is a part of it. */
typedef struct esper_checkpoint_delta {
  void **freed, **live;
  size_t freed_count, live_count;
} esper_checkpoint_delta;

/* Frees every live block of the pool, cuts its memory as it was, and makes live
 * again what was live; the caller frees those. What any byte owes stays on it: a
 * use of a block that is live again counts when that is freed. Waits for calls
 * that are at work in the pool, and for nothing on the device.
 * ESPER_INVALID: the pool, or memory of the checkpoint, is gone, or allocations go
 * to the pool. */
ESPER_API esper_status esper_checkpoint_restore(esper_core *core,
                                                const esper_checkpoint *checkpoint,
                                                esper_checkpoint_delta *delta);

/* ------------------------------------------------------------------------
 * Limits and figures
 * ---------------------------------------------------------------------- */

/* `fraction` of the device's total memory in [0, 1]: what may be reserved from now on.
 * 1 is no limit; with 0 only memory that is there already serves. */
ESPER_API esper_status esper_set_memory_fraction(esper_core *core, int device, double fraction);
ESPER_API double esper_get_memory_fraction(const esper_core *core, int device);

/* Replaces the sizes and orders of the configuration; its functions too. */
ESPER_API esper_status esper_configure(esper_core *core, const esper_config *config);
ESPER_API void esper_get_config(const esper_core *core, esper_config *config);

typedef struct esper_stat {
  int64_t current, peak, allocated, freed;
} esper_stat;

enum { ESPER_ALL, ESPER_SMALL, ESPER_LARGE, ESPER_CLASSES };

/* What torch.cuda.memory_stats() reports. `allocated*` fall at the free,
 * `active*` and `requested*` when the block owes nothing any more. */
typedef struct esper_stats {
  esper_stat allocation[ESPER_CLASSES];
  esper_stat segment[ESPER_CLASSES];
  esper_stat active[ESPER_CLASSES];
  esper_stat inactive_split[ESPER_CLASSES];
  esper_stat allocated_bytes[ESPER_CLASSES];
  esper_stat reserved_bytes[ESPER_CLASSES];
  esper_stat active_bytes[ESPER_CLASSES];
  esper_stat inactive_split_bytes[ESPER_CLASSES];
  esper_stat requested_bytes[ESPER_CLASSES];
  esper_stat oversize_allocations;
  esper_stat oversize_segments;
  int64_t num_alloc_retries;
  int64_t num_ooms;
  int64_t num_oom_rejections; /* by rejection_share */
  int64_t num_sync_all_streams;
  int64_t num_device_alloc;
  int64_t num_device_free;
  int64_t max_split_size; /* -1: unlimited */
} esper_stats;

/* Retires first, so that what has completed no longer counts as active. */
ESPER_API esper_status esper_get_stats(esper_core *core, int device, esper_stats *stats);
ESPER_API esper_status esper_reset_peak_stats(esper_core *core, int device);
ESPER_API esper_status esper_reset_accumulated_stats(esper_core *core, int device);

/* What a private pool has reserved. */
typedef struct esper_pool_stats {
  uint64_t id[2];
  esper_stat reserved_bytes[ESPER_CLASSES];
} esper_pool_stats;

/* Copies the figures of the device's private pools that ever had memory, oldest first,
 * into *pools (freed with free()); *count is their number. Those of a pool that is
 * gone stay until the resets above have made them all zero, or until they are not
 * among the youngest 256 of such pools. */
ESPER_API esper_status esper_get_pool_stats(esper_core *core, int device, esper_pool_stats **pools,
                                            size_t *count);

/* Figures of our own, per device. */
typedef struct esper_counters {
  uint64_t gates_issued;   /* waits put on streams for the sake of reuse */
  uint64_t gates_skipped;  /* waits the frontier made unnecessary */
  uint64_t loans;          /* blocks handed out on another stream than home */
  uint64_t uses_pending;   /* uses attached to live or free blocks */
  uint64_t bytes_pending;  /* free bytes that still owe something */
  uint64_t blocks_held;    /* free blocks with a use no event stands for */
  uint64_t events_alive;   /* events that exist, in use or pooled */
  uint64_t events_created; /* since the core was made */
  uint64_t metadata_bytes; /* host memory of blocks, uses, records, addresses */
  uint64_t captured_uses;  /* marks in captures, of memory from outside them */
  uint64_t captured_frees; /* frees of memory so marked: replays may read it */
  uint64_t bytes_orphaned; /* pages that the driver would neither map nor take
                              back, in no segment; they are tried again        */
  uint64_t pages_moved;    /* from where they were free to where a heap grew */
} esper_counters;
ESPER_API esper_status esper_get_counters(esper_core *core, int device, esper_counters *counters);

/* A gate: a stream that was made to wait for another's work, because it got
 * memory that this work may still touch. */
typedef struct esper_gate_entry {
  int device;
  void *waiting; /* handle of the stream that was made to wait */
  int stream_device;
  void *stream;      /* handle of the stream whose work it waits for; NULL: the
                        legacy stream, or all of the device's                  */
  uint64_t number;   /* of that stream's event */
  size_t size;       /* bytes of the block */
  int64_t issued_us; /* since 1970 */
} esper_gate_entry;

/* Copies the device's gates that are not known to be over, oldest first, into
 * *entries (freed with free()); *count is their number. Of very many the oldest
 * may be missing. For reports about programs that hang. */
ESPER_API esper_status esper_gates_copy(esper_core *core, int device, esper_gate_entry **entries,
                                        size_t *count);

/* Calls made to the driver since the core was made, by function; of calls that
 * threads make at the same moment some may go uncounted.
 * esper_driver_call_name(i) for i from 0 is NULL past the last. */
ESPER_API const char *esper_driver_call_name(int call);
ESPER_API uint64_t esper_driver_calls(const esper_core *core, int call);

/* The figures of the calling thread's last ESPER_OUT_OF_MEMORY or
 * ESPER_REJECTED. */
typedef struct esper_failure {
  int device;
  size_t requested;   /* bytes asked for */
  size_t size;        /* as they would have been handed out, rounded up */
  size_t device_free; /* as the driver says */
  size_t device_total;
  size_t limit;         /* bytes the memory fraction allows; SIZE_MAX: all */
  size_t allocated;     /* live bytes */
  size_t private_pools; /* of the reserved bytes: in pools but the default */
  size_t reserved;
  size_t segment; /* bytes that the device was to be asked for */
} esper_failure;
ESPER_API void esper_get_failure(esper_failure *failure);

/* Device memory as the driver reports it, in bytes. */
ESPER_API esper_status esper_memory_info(esper_core *core, int device, size_t *free, size_t *total);

/* The largest block that a malloc could get: free now in the cache of any pool, private
 * ones included, or from the device within the memory fraction, whichever is more. */
ESPER_API esper_status esper_largest_available(esper_core *core, int device, size_t *bytes);

/* The block around an address, live or not. */
typedef struct esper_block_info {
  void *address;
  size_t size;      /* as handed out, rounded up */
  size_t requested; /* as asked for */
  int device;
  int live;
  void *stream; /* handle of the stream it was last handed out on */
  void *segment_address;
  size_t segment_size; /* of a mapped segment: of all its addresses */
  int mapped;          /* it has pages: see esper_share() */
  uint64_t pool[2];    /* id of its pool; 0, 0: the default pool */
} esper_block_info;
ESPER_API esper_status esper_find_block(esper_core *core, const void *ptr, esper_block_info *info);

/* From now on kernels and copies of `peer` may access the pages of `device`: those that are
 * mapped already, and all that will be. It cannot be taken back. For classic segments
 * that is what cudaDeviceEnablePeerAccess does; both may be called in any order.
 * ESPER_INVALID: no such devices, or one and the same; ESPER_UNSUPPORTED: the one cannot
 * reach the other. Whatever went wrong, the peer has no access. */
ESPER_API esper_status esper_add_peer(esper_core *core, int device, int peer);

/* The memory that lies together around the live block with `ptr`: its segment, or of a
 * mapped one the stretch that has pages. Slower than esper_find_block(). */
ESPER_API esper_status esper_find_base(esper_core *core, const void *ptr, void **address,
                                       size_t *size);

/* A page of mapped segments, by a name that means the same in every process of this user on
 * this machine. Who knows it may open the page: show it to nobody else. */
typedef struct esper_page_name {
  uint64_t process, key; /* who offers it */
  uint64_t number;       /* of the offer: random */
  uint64_t size;         /* bytes of the page */
} esper_page_name;

/* Names the pages that the live block with `ptr` lies on, from its first to its last:
 * *count names in *pages (freed with free()), the first one's page being mapped at *address
 * here. From now on these pages neither move nor go back, whatever becomes of their blocks;
 * their free memory serves on. ESPER_INVALID: `ptr` is in no live block of a mapped segment;
 * ESPER_UNSUPPORTED: this device's pages cannot be shared. */
ESPER_API esper_status esper_share(esper_core *core, const void *ptr, void **address,
                                   esper_page_name **pages, size_t *count);

/* Ends that for all pages on which nothing is live: nobody may open them any more by their
 * names. Who has them open keeps their memory, not its contents. How many they were. */
ESPER_API size_t esper_unshare(esper_core *core);

/* Maps pages that were named here or in another process one after the other, for `device`
 * and its peers; *address is where they begin. The memory lives until both sides are done
 * with it. ESPER_INVALID: the names make no sense, or nobody offers them any more. */
ESPER_API esper_status esper_open_shared(esper_core *core, int device, const esper_page_name *pages,
                                         size_t count, void **address);

/* Unmaps them, once the work that is on the device now, and on its peers, is done: at once,
 * or, where the host may not wait (a capture, a stream of rendezvous work), in a later call
 * of these two or esper_empty_cache(). ESPER_INVALID: nothing open begins there. */
ESPER_API esper_status esper_close_shared(esper_core *core, void *address);

/* Pins the segment around `ptr`: whoever knows its address, in another process
 * for one, may go on using it after the memory was freed here, so it is never
 * given back. It serves on as before. *segment (may be NULL) is its first
 * address. ESPER_INVALID: `ptr` is in no live block. */
ESPER_API esper_status esper_pin(esper_core *core, const void *ptr, void **segment);

/* Ends it. ESPER_INVALID: no segment that is pinned begins there.
 * ESPER_NOT_READY: a block of it is live, so somebody may still be given the
 * address; it stays pinned. */
ESPER_API esper_status esper_unpin(esper_core *core, void *segment);

/* ------------------------------------------------------------------------
 * Snapshot and trace
 * ---------------------------------------------------------------------- */

typedef enum esper_block_state {
  ESPER_BLOCK_ALLOCATED,    /* live */
  ESPER_BLOCK_PENDING_FREE, /* freed, still owes uses */
  ESPER_BLOCK_INACTIVE      /* free */
} esper_block_state;

/* What kind of use it is: none of these for a plain mark. */
enum {
  ESPER_ENTRY_NO_GATE = 1u, /* no stream is ever made to wait for it */
  ESPER_ENTRY_AT_FREE = 2u, /* by record_stream: ends with the free */
  ESPER_ENTRY_HELD = 4u,    /* no event stands for it: held until the device
                               was synchronised                                */
  ESPER_ENTRY_CAPTURED = 8u /* a place in a capture's graph stands for it: ends
                               for who comes after that there                  */
};

/* A use that is not known to be over. */
typedef struct esper_use_entry {
  int device;      /* of the stream */
  void *stream;    /* handle; NULL: the legacy stream, or all of the device's */
  uint64_t number; /* of the stream's event that ends it; 0: none yet */
  unsigned kind;   /* ESPER_ENTRY_... */
} esper_use_entry;

typedef struct esper_block_entry {
  uintptr_t address;
  size_t size, requested;
  esper_block_state state;
  void *stream;
  unsigned uses;    /* those that are not known to be over */
  size_t first_use; /* into the snapshot's uses */
} esper_block_entry;

typedef struct esper_segment_entry {
  uintptr_t address;
  size_t size;
  int device;
  int large;  /* size class */
  int mapped; /* pages mapped into a reserved range */
  void *stream;
  uint64_t pool[2];
  uint64_t birth; /* orders a device's segments; the stretches of a mapped one share it */
  size_t first_block, block_count; /* into blocks */
} esper_segment_entry;

typedef struct esper_snapshot {
  size_t segment_count, block_count, use_count;
  esper_segment_entry *segments; /* by address */
  esper_block_entry *blocks;     /* by address within each segment */
  esper_use_entry *uses;         /* of each block together */
} esper_snapshot;

/* One consistent picture of a device (-1: all, each consistent on its own). */
ESPER_API esper_status esper_snapshot_take(esper_core *core, int device, esper_snapshot *snapshot);
ESPER_API void esper_snapshot_free(esper_snapshot *snapshot);

typedef enum esper_action {
  ESPER_TRACE_ALLOC,
  ESPER_TRACE_FREE_REQUESTED,
  ESPER_TRACE_FREE_COMPLETED,
  ESPER_TRACE_SEGMENT_ALLOC,
  ESPER_TRACE_SEGMENT_FREE,
  ESPER_TRACE_SEGMENT_MAP,
  ESPER_TRACE_SEGMENT_UNMAP,
  ESPER_TRACE_SNAPSHOT,
  ESPER_TRACE_OOM /* address: bytes free on the device */
} esper_action;

typedef struct esper_trace_entry {
  esper_action action;
  int device;
  uintptr_t address;
  size_t size; /* alloc and free: as asked for */
  void *stream;
  uint64_t pool[2];
  int64_t time_us; /* since 1970 */
} esper_trace_entry;

/* Keeps the last `max_entries` actions of each device from now on; 0 stops
 * and forgets. */
ESPER_API esper_status esper_trace_start(esper_core *core, size_t max_entries);
ESPER_API int esper_trace_is_on(const esper_core *core);
ESPER_API void esper_trace_clear(esper_core *core);

/* Copies a device's entries, oldest first, into *entries (freed with free());
 * *count is their number. */
ESPER_API esper_status esper_trace_copy(esper_core *core, int device, esper_trace_entry **entries,
                                        size_t *count);

/* Told of every action of a device as it happens, under that device's lock: it
 * must not call the core, nor wait for a thread that might. */
typedef void esper_trace_watch_fn(void *context, const esper_trace_entry *entry);

/* From now on `watch` is told, whether a trace is kept or not; NULL: nobody is.
 * When this returns, no thread is in the one before. */
ESPER_API void esper_trace_watch(esper_core *core, esper_trace_watch_fn *watch, void *context);

/* ------------------------------------------------------------------------
 * Checking
 * ---------------------------------------------------------------------- */

/* Walks every structure; nonzero when all invariants hold. Slow: for tests. */
ESPER_API int esper_core_is_valid(esper_core *core);

#ifdef __cplusplus
}
#endif
#endif
