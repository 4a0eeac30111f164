/* audit_capi.h: the happens-before engine (../audit/audit.h) that esper_alloc._core offers to
 * esper_alloc._torch of the same build, as the capsule named below. Valid C11 and C++ (GNU: for
 * __typeof__). */
#ifndef ESPER_AUDIT_CAPI_H
#define ESPER_AUDIT_CAPI_H

#include "../audit/audit.h"

#define ESPER_AUDIT_CAPI_NAME "esper_alloc._core.audit"

/* F(name) for each function audit_<name> */
#define ESPER_AUDIT_FUNCTIONS(F) \
  F(create)                      \
  F(destroy)                     \
  F(is_complete)                 \
  F(record)                      \
  F(wait)                        \
  F(event_destroyed)             \
  F(event_synchronized)          \
  F(stream_synchronized)         \
  F(device_synchronized)         \
  F(allocated)                   \
  F(freed)                       \
  F(accessed)                    \
  F(marked)                      \
  F(marked_by_event)             \
  F(held)                        \
  F(capture_began)               \
  F(capture_ended)               \
  F(replayed)                    \
  F(graph_destroyed)             \
  F(generation)                  \
  F(handed_out) F(report) F(last_free) F(judge_rest) F(finding_count) F(finding_at) F(memory)

#define ESPER_AUDIT_TYPE(name) typedef __typeof__(audit_##name) *esper_audit_##name;
ESPER_AUDIT_FUNCTIONS(ESPER_AUDIT_TYPE)
#undef ESPER_AUDIT_TYPE

struct esper_audit_capi {
  size_t size; /* sizeof(struct esper_audit_capi) in the _core that made this */
#define ESPER_AUDIT_MEMBER(name) esper_audit_##name name;
  ESPER_AUDIT_FUNCTIONS(ESPER_AUDIT_MEMBER)
#undef ESPER_AUDIT_MEMBER
};

#endif
