/* sharing.c: pages that other processes use, too. A page travels as a file descriptor, which the
 * driver creates on request. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "../fd_server.h"
#include "failure.h"
#include "functions.h"
#include "scope.h"

static esper_status export_file(int device, uint64_t page, int *file)
{
  cuda_scope s;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  if (atomic_load(&s.device->sharing) == SHARING_IS_REFUSED)
    return cuda_scope_leave(&s, cuda_refuse(ESPER_UNSUPPORTED,
                                            "the driver cannot make pages on CUDA device %d that "
                                            "other processes can open",
                                            device));
  *file = -1;
  return cuda_scope_leave(&s, CALL(cuMemExportToShareableHandle, file, page,
                                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

static int open_page(int device, uint64_t page)
{
  int file = -1;
  return export_file(device, page, &file) == ESPER_OK ? file : -1;
}

esper_status cuda_page_export(void *self, int device, uint64_t page, esper_page_name *name)
{
  (void)self;
  int file;
  fd_server_name offered;
  /* Now, because a failure later could not be reported to the caller. */
  esper_status status = export_file(device, page, &file);
  if (status != ESPER_OK)
    return status;
  int error = fd_server_offer(open_page, device, page, file, &offered);
  if (error)
    return cuda_refuse(ESPER_UNSUPPORTED, "a page cannot be offered to other processes: %s",
                       strerror(error));
  *name =
      (esper_page_name){.process = offered.process, .key = offered.key, .number = offered.number};
  return ESPER_OK;
}

esper_status cuda_page_unexport(void *self, int device, const esper_page_name *name)
{
  (void)self, (void)device;
  fd_server_withdraw(name->number);
  return ESPER_OK;
}

static const char *why_not_taken(int error)
{
  switch (error) {
  case ECONNREFUSED: return "it has ended, or runs in another network (in another container?)";
  case ECONNRESET: return "it ended while it was asked";
  case EACCES: return "it runs as another user";
  case ENOENT: return "the memory was freed there";
  case EIO: return "its driver refused, perhaps because it has no file descriptors left";
  case EMFILE: return "this process has no file descriptors left (raise the limit: ulimit -n)";
  case ETIMEDOUT: return "it does not answer (is it stopped, or in a debugger?)";
  default: return strerror(error);
  }
}

static esper_status take_file(const esper_page_name *name, int *file)
{
  fd_server_name offered = {name->process, name->key, name->number};
  int error = fd_server_take(&offered, file);
  if (!error)
    return ESPER_OK;
  return cuda_refuse(ESPER_INVALID,
                     "process %llu, which shared this memory, did not provide it: %s",
                     (unsigned long long)name->process, why_not_taken(error));
}

esper_status cuda_page_import(void *self, int device, const esper_page_name *name, uint64_t *page)
{
  (void)self;
  int file;
  cuda_scope s;
  CUmemGenericAllocationHandle handle = 0;
  esper_status status = cuda_scope_enter_virtual(&s, device);
  if (status != ESPER_OK)
    return status;
  if (!libcuda.cuMemImportFromShareableHandle)
    return cuda_scope_leave(&s, cuda_refuse(ESPER_UNSUPPORTED,
                                            "cuMemImportFromShareableHandle is missing: "
                                            "update the NVIDIA driver"));
  status = take_file(name, &file);
  if (status != ESPER_OK)
    return cuda_scope_leave(&s, status);
  status = CALL(cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)file,
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(file);
  if (status == ESPER_OK)
    *page = handle;
  return cuda_scope_leave(&s, status);
}
