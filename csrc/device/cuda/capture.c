/* capture.c: asks about the graph of a capture and adds to it. */
#include "failure.h"
#include "functions.h"
#include "scope.h"

enum { TAILS = 64 }; /* most nodes that a stream's next operation may depend on */

/* These calls know full dependencies only. In a capture with other ones (programmatic launches) the
 * driver refuses them. */
static esper_status scope_enter_capture(cuda_scope *s, int device)
{
  esper_status status = cuda_scope_enter(s, device, SCOPE_PLAIN);
  if (status != ESPER_OK || (libcuda.cuStreamUpdateCaptureDependencies &&
                             libcuda.cuGraphAddEmptyNode && libcuda.cuGraphNodeGetDependencies))
    return status;
  return cuda_scope_leave(
      s, cuda_refuse(ESPER_UNSUPPORTED,
                     "the CUDA driver, version %d.%d, cannot show the graph of a capture",
                     cuda_version / 1000, cuda_version % 1000 / 10));
}

/* Copies the nodes at once, because the driver's array lasts only until the next call. */
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
    return cuda_refuse(ESPER_INVALID, "the stream is no longer in capture %llu",
                       (unsigned long long)capture);
  if (*count > TAILS)
    return cuda_refuse(ESPER_UNSUPPORTED, "the stream's next operation depends on %zu nodes",
                       *count);
  for (size_t i = 0; i < *count; i++)
    tails[i] = found[i];
  return ESPER_OK;
}

/* Whether `node` comes after all others, as an empty node does that was added for this purpose. */
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

/* Adds the empty node to the dependencies instead of replacing them, because another thread may be
 * capturing an operation at this moment. */
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
  /* If the capture was ended or invalidated, its graph may be gone. */
  status = tails_of(stream, capture, &graph, tails, &tail_count);
  if (status == ESPER_OK)
    status = CALL(cuGraphNodeGetDependencies, node, (CUgraphNode *)before, &found);
  if (status == ESPER_OK && found >= *count)
    status = cuda_refuse(ESPER_UNSUPPORTED, "a node depends on %zu others, or more", found);
  if (status == ESPER_OK)
    *count = found;
  return cuda_scope_leave(&s, status);
}
