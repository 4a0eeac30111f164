/* findings.c: what was found. */
#include "findings.h"

static uint64_t mixed(uint64_t hash, uint64_t value)
{
  hash = (hash ^ value) * 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 32);
}

uint64_t finding_key(const audit_finding *f)
{
  uint64_t key = mixed(1, f->kind);
  key = mixed(key, f->earlier.place.site);
  key = mixed(key, f->freed);
  key = mixed(key, f->marked);
  /* What touches the memory of a freed block first is chance, so it does not tell findings
   * apart. */
  if (f->kind != AUDIT_FREED_IN_USE && f->kind != AUDIT_MARKED_EARLY)
    key = mixed(key, f->later.place.site);
  return key;
}

audit_finding *finding_add(audit *a, const audit_finding *finding)
{
  uint64_t key = finding_key(finding);
  size_t known = (size_t)table_get(&a->finding_keys, key); /* its index plus 1 */
  if (known) {
    a->findings[known - 1].count += finding->count;
    return &a->findings[known - 1];
  }
  if (!audit_reserve((void **)&a->findings, &a->finding_capacity, a->finding_count,
                     sizeof *finding) ||
      !table_put(&a->finding_keys, key, (void *)(a->finding_count + 1))) {
    a->lost = 1;
    return NULL;
  }
  audit_finding *added = &a->findings[a->finding_count];
  *added = *finding;
  added->cause = a->finding_count++;
  return added;
}

void audit_report(audit *a, const audit_finding *finding)
{
  finding_add(a, finding);
}

size_t audit_finding_count(const audit *a)
{
  return a->finding_count;
}

const audit_finding *audit_finding_at(const audit *a, size_t index)
{
  return &a->findings[index];
}
