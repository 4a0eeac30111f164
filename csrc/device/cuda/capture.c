/* capture.c: asks about the graph of a capture. */
#include "failure.h"
#include "functions.h"
#include "scope.h"

/* These calls know full dependencies only. In a capture with other ones (programmatic launches) the
 * driver refuses them. */
static esper_status scope_enter_capture(cuda_scope *s, int device)
{
  esper_status status = cuda_scope_enter(s, device, SCOPE_PLAIN);
  if (status != ESPER_OK || libcuda.cuGraphNodeGetDependencies)
    return status;
  return cuda_scope_leave(
      s, cuda_refuse(ESPER_UNSUPPORTED,
                     "the CUDA driver, version %d.%d, cannot show the graph of a capture",
                     cuda_version / 1000, cuda_version % 1000 / 10));
}

/* The driver's array lasts only until the next call. */
static esper_status tails_of(CUstream stream, uint64_t capture, const CUgraphNode **tails,
                             size_t *count)
{
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = NULL;
  cuuint64_t id = 0;
  *count = 0;
  esper_status status = CALL(cuStreamGetCaptureInfo, stream, &state, &id, &graph, tails, count);
  if (status != ESPER_OK)
    return status;
  if (state != CU_STREAM_CAPTURE_STATUS_ACTIVE || id != capture)
    return cuda_refuse(ESPER_INVALID, "the stream is no longer in capture %llu",
                       (unsigned long long)capture);
  return ESPER_OK;
}

static esper_status refuse_many(size_t count)
{
  return cuda_refuse(ESPER_UNSUPPORTED, "an operation depends on %zu others, or more", count);
}

esper_status cuda_capture_tails(void *self, int device, void *stream, uint64_t capture,
                                void **tails, size_t *count)
{
  (void)self;
  const CUgraphNode *nodes = NULL;
  size_t found;
  cuda_scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  status = tails_of(stream, capture, &nodes, &found);
  if (status == ESPER_OK && found >= *count)
    status = refuse_many(found);
  if (status == ESPER_OK) {
    *count = found;
    for (size_t i = 0; i < found; i++)
      tails[i] = nodes[i];
  }
  return cuda_scope_leave(&s, status);
}

esper_status cuda_capture_before(void *self, int device, void *stream, uint64_t capture, void *node,
                                 void **before, size_t *count)
{
  (void)self;
  const CUgraphNode *tails = NULL;
  size_t found = *count, tail_count;
  cuda_scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  /* If the capture was ended or invalidated, its graph may be gone. */
  status = tails_of(stream, capture, &tails, &tail_count);
  if (status == ESPER_OK)
    status = CALL(cuGraphNodeGetDependencies, node, (CUgraphNode *)before, &found);
  if (status == ESPER_OK && found >= *count)
    status = refuse_many(found);
  if (status == ESPER_OK)
    *count = found;
  return cuda_scope_leave(&s, status);
}
