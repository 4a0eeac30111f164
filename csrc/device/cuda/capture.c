/* capture.c: the graph of a capture, from inside. */
#include "failure.h"
#include "functions.h"
#include "scope.h"

enum { TAILS = 64 }; /* nodes that a stream's next operation may depend on */

/* What is asked of captures here knows full dependencies only: of a capture with
 * others (programmatic launches) the driver will not speak in these terms. */
static esper_status scope_enter_capture(cuda_scope *s, int device)
{
  esper_status status = cuda_scope_enter(s, device, SCOPE_PLAIN);
  if (status != ESPER_OK || (libcuda.cuStreamUpdateCaptureDependencies &&
                             libcuda.cuGraphAddEmptyNode && libcuda.cuGraphNodeGetDependencies))
    return status;
  return cuda_scope_leave(s, cuda_refuse(ESPER_UNSUPPORTED,
                                         "this driver, %d.%d, does not show the graph of a capture",
                                         cuda_version / 1000, cuda_version % 1000 / 10));
}

/* The driver's array lasts until the next call: it is copied at once. */
static esper_status tails_of(CUstream stream, uint64_t capture, CUgraph *graph, CUgraphNode *tails,
                             size_t *count)
{
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUgraphNode *found = NULL;
  cuuint64_t id = 0;
  *count = 0;
  esper_status status = CALL(cuStreamGetCaptureInfo, stream, &state, &id, graph, &found, count);
  if (status != ESPER_OK)
    return status;
  if (state != CU_STREAM_CAPTURE_STATUS_ACTIVE || id != capture)
    return cuda_refuse(ESPER_INVALID, "the stream is not in capture %llu any more",
                       (unsigned long long)capture);
  if (*count > TAILS)
    return cuda_refuse(ESPER_UNSUPPORTED, "the stream's next operation depends on %zu nodes",
                       *count);
  for (size_t i = 0; i < *count; i++)
    tails[i] = found[i];
  return ESPER_OK;
}

/* As an empty node does that was added after the others. */
static bool is_after_others(CUgraphNode node, const CUgraphNode *tails, size_t count)
{
  CUgraphNode before[TAILS];
  size_t found = TAILS;
  if (libcuda.cuGraphNodeGetDependencies(node, before, &found) != CUDA_SUCCESS)
    return false;
  for (size_t i = 0; i < count; i++) {
    size_t k = 0;
    while (k < found && before[k] != tails[i])
      k++;
    if (k == found && tails[i] != node)
      return false;
  }
  return true;
}

/* The empty node is added to the dependencies and replaces none: somebody may
 * just be capturing another operation. */
static esper_status point_after(CUstream stream, CUgraph graph, CUgraphNode *tails, size_t count,
                                CUgraphNode *node)
{
  *node = count ? tails[count - 1] : NULL;
  if (count < 2 || is_after_others(*node, tails, count))
    return ESPER_OK;
  CUgraphNode empty = NULL;
  esper_status status = CALL(cuGraphAddEmptyNode, &empty, graph, tails, count);
  if (status == ESPER_OK)
    status = CALL(cuStreamUpdateCaptureDependencies, stream, &empty, 1,
                  CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
  *node = empty;
  return status;
}

esper_status cuda_capture_point(void *self, int device, void *stream, uint64_t capture, void **node)
{
  (void)self;
  CUgraph graph = NULL;
  CUgraphNode tails[TAILS], point = NULL;
  size_t count;
  cuda_scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  status = tails_of(stream, capture, &graph, tails, &count);
  if (status == ESPER_OK)
    status = point_after(stream, graph, tails, count, &point);
  if (status == ESPER_OK)
    *node = point;
  return cuda_scope_leave(&s, status);
}

esper_status cuda_capture_depend(void *self, int device, void *stream, uint64_t capture, void *node)
{
  (void)self;
  CUgraph graph;
  CUgraphNode tails[TAILS], added = node;
  size_t count;
  cuda_scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  status = tails_of(stream, capture, &graph, tails, &count);
  if (status == ESPER_OK)
    status = CALL(cuStreamUpdateCaptureDependencies, stream, &added, 1,
                  CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
  return cuda_scope_leave(&s, status);
}

esper_status cuda_capture_before(void *self, int device, void *stream, uint64_t capture, void *node,
                                 void **before, size_t *count)
{
  (void)self;
  CUgraph graph;
  CUgraphNode tails[TAILS];
  size_t found = *count, tail_count;
  cuda_scope s;
  esper_status status = scope_enter_capture(&s, device);
  if (status != ESPER_OK)
    return status;
  /* The graph of a capture that somebody ended or spoiled may be gone. */
  status = tails_of(stream, capture, &graph, tails, &tail_count);
  if (status == ESPER_OK)
    status = CALL(cuGraphNodeGetDependencies, node, (CUgraphNode *)before, &found);
  if (status == ESPER_OK && found >= *count)
    status = cuda_refuse(ESPER_UNSUPPORTED, "a node depends on %zu others, or more", found);
  if (status == ESPER_OK)
    *count = found;
  return cuda_scope_leave(&s, status);
}
