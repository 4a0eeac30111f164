#include "audit_operators.h"

#include <c10/util/hash.h>
#include <torch/csrc/autograd/function.h>

#include "../automatic/automatic.h"
#include "../debugging/fence.h"
#include "../debugging/sites.h"
#include "footprints.h"

namespace esper::auditing
{

namespace
{

using c10::cuda::CUDAStream;

std::atomic<bool> has_graphs{false};
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE; // with the GIL

// What a thread is doing.
struct Thread {
  // The functions that run, the innermost last. Null: one without a schema, such as the forward of
  // an autograd.Function.
  c10::SmallVector<const Operation *, 16> running;
  bool site_is_known = false;
  int pytorchs_own = 0; // above 0: its accesses are PyTorch's own, and not audited
  uint32_t site = 0;    // of the outermost of those that run no Python between them

  const Operation *innermost() const
  {
    return running.empty() ? nullptr : running.back();
  }
  // Whether what runs now is at the same line as what was asked for last.
  bool keeps_site() const
  {
    return innermost() != nullptr && !innermost()->may_run_python;
  }
};
thread_local Thread thread;

// Null: the tensor is no view of a graph's output.
const View *view_of(const Auditor &a, const c10::TensorImpl *tensor)
{
  if (C10_LIKELY(a.views.empty())) {
    return nullptr;
  }
  const auto found = a.views.find(tensor);
  return found != a.views.end() && !found->second.tensor.expired() ? &found->second : nullptr;
}

void tell_record_stream(const at::RecordFunction &function)
{
  const auto inputs = function.inputs();
  if (inputs.size() < 2 || !inputs[0].isTensor() || !inputs[1].isStream()) {
    return;
  }
  const CUDAStream stream(inputs[1].toStream());
  const uint32_t site = site_now();
  each_access(inputs[0], [&](const Access &access) {
    with_engine([&](Auditor & /*a*/, audit *engine) {
      functions->marked(engine, reinterpret_cast<uintptr_t>(access.data), name_of(stream), 1, site);
    });
  });
}

// What an operator that makes views was given of graphs' outputs.
struct Outputs : at::ObserverContext {
  struct Output {
    const c10::TensorImpl *tensor;
    uintptr_t address;
    uint64_t born, like; // of a view; of the output itself `like` is 0
  };
  c10::SmallVector<Output, 2> all;
};

std::unique_ptr<Outputs> outputs_among(c10::ArrayRef<const c10::IValue> inputs)
{
  std::unique_ptr<Outputs> found;
  for (const c10::IValue &input : inputs) {
    each_access(input, [&](const Access &access) {
      with_engine([&](Auditor &a, audit *engine) {
        const auto address = reinterpret_cast<uintptr_t>(access.data);
        const uint64_t generation = functions->generation(engine, address);
        if (generation == 0) {
          return;
        }
        if (!found) {
          found = std::make_unique<Outputs>();
        }
        const View *view = view_of(a, &access.tensor);
        found->all.push_back({&access.tensor, address, view != nullptr ? view->born : generation,
                              view != nullptr ? view->like : 0});
      });
    });
  }
  return found;
}

uint64_t likeness(const Operation &operation, const Access &access)
{
  const auto address = reinterpret_cast<uintptr_t>(access.data);
  audit_footprint bytes{};
  footprint_of(access.tensor, address,
               storage_size(*access.tensor.unsafe_storage().unsafeGetStorageImpl()), bytes);
  return c10::get_hash(operation.number, shape_of(access.tensor).hash(), bytes.begin - address,
                       bytes.size, bytes.period, bytes.run) |
         1;
}

// A view of an output is handed out for the last replay. A view of such a view is for the same one.
void note_view(const Operation &operation, const Outputs &outputs, const Access &access)
{
  const Outputs::Output *base = nullptr;
  for (const Outputs::Output &output : outputs.all) {
    if (output.tensor == &access.tensor) {
      return; // changed in place, or returned as it was
    }
    if (base == nullptr && output.address == reinterpret_cast<uintptr_t>(access.data)) {
      base = &output;
    }
  }
  if (base == nullptr) {
    return;
  }
  with_engine([&](Auditor &a, audit *engine) {
    auto *tensor = const_cast<c10::TensorImpl *>(&access.tensor);
    if (view_of(a, tensor) != nullptr) {
      return; // an operator that this one called has made it
    }
    if (a.views.size() > 4096) {
      for (auto view = a.views.begin(); view != a.views.end();) {
        view = view->second.tensor.expired() ? a.views.erase(view) : std::next(view);
      }
    }
    const uint64_t like = base->like != 0 ? base->like : likeness(operation, access);
    if (base->like == 0) {
      functions->handed_out(engine, base->address, like);
    }
    a.views.erase(tensor);
    a.views.emplace(tensor,
                    View{c10::weak_intrusive_ptr<c10::TensorImpl>(
                             c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(
                                 tensor)),
                         base->born, like});
  });
}

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction &function)
{
  // A forked child takes no lock here: another thread may have held it.
  const Operation *operation =
      running.load(std::memory_order_relaxed) ? find_operation(function) : nullptr;
  thread.site_is_known = thread.site_is_known && thread.keeps_site();
  thread.running.push_back(operation);
  if (operation == nullptr) {
    return nullptr;
  }
  if (C10_UNLIKELY(operation->is_record_stream)) {
    tell_record_stream(function);
    return nullptr;
  }
  AllSeen all;
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Argument what = operation->argument(i);
    if (what != Argument::none) {
      each_access(inputs[i],
                  [&](const Access &access) { add_seen(all, access, what == Argument::write); });
    }
  }
  tell_accesses(all, operation->number);
  if (!all.empty()) {
    sites::note_forward(function.seqNr(), thread.site);
  }
  return operation->makes_views && has_graphs.load(std::memory_order_relaxed)
             ? outputs_among(inputs)
             : nullptr;
}

void operator_ends(const at::RecordFunction &function, at::ObserverContext *given)
{
  if (C10_UNLIKELY(given != nullptr)) {
    const Operation *operation = thread.innermost();
    for (const c10::IValue &output : function.outputs()) {
      each_access(output, [&](const Access &access) {
        note_view(*operation, *static_cast<const Outputs *>(given), access);
      });
    }
  }
  thread.site_is_known = thread.site_is_known && thread.keeps_site();
  if (!thread.running.empty()) {
    thread.running.pop_back();
  }
  thread.site_is_known = thread.site_is_known && thread.keeps_site();
}

void register_callback(bool with_outputs)
{
  if (callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback);
  }
  callback = at::addGlobalCallback(at::RecordFunctionCallback(operator_starts, operator_ends)
                                       .needsInputs(true)
                                       .needsOutputs(with_outputs)
                                       .scopes({at::RecordScope::FUNCTION}));
}

} // namespace

uint32_t site_now()
{
  if (thread.keeps_site() && thread.site_is_known) {
    return thread.site;
  }
  thread.site = sites::now();
  thread.site_is_known = true;
  return thread.site;
}

const Operation *operation_now()
{
  return thread.innermost();
}

void add_seen(AllSeen &all, const Access &access, bool writes)
{
  const c10::StorageImpl *storage = access.tensor.unsafe_storage().unsafeGetStorageImpl();
  Seen seen{{}, &access.tensor, access.stream};
  seen.access.address = reinterpret_cast<uintptr_t>(access.data);
  seen.access.size = storage_size(*storage);
  if (!footprint_of(access.tensor, seen.access.address, seen.access.size, seen.access.bytes)) {
    return; // no element
  }
  seen.access.stream = name_of(access.stream);
  seen.access.writes = writes ? 1 : 0;
  all.push_back(seen);
}

namespace
{

// Only whoever keeps an address without its tensor can access memory after its free.
void report_use_after_free(audit *engine, const audit_access &access)
{
  const auto freed = fence::is_on() ? fence::freed_at(access.address) : std::nullopt;
  if (!freed) {
    return;
  }
  audit_finding f{};
  f.kind = AUDIT_USED_AFTER_FREE;
  f.count = 1;
  f.address = freed->address;
  f.size = freed->size;
  f.allocated = freed->allocated;
  f.home_is_known = 1;
  f.home = {freed->device, freed->home};
  f.later = {access.place, access.stream, access.writes, 0};
  f.has_later = 1;
  f.freed = freed->freed;
  functions->report(engine, &f);
}

} // namespace

void tell_accesses(AllSeen &all, uint32_t operation)
{
  if (all.empty()) {
    return;
  }
  const uint32_t site = site_now();
  if (thread.pytorchs_own > 0) {
    return;
  }
  const bool is_backward = torch::autograd::get_current_node() != nullptr;
  with_engine([&](Auditor &a, audit *engine) {
    for (Seen &seen : all) {
      const audit_access &access = seen.access;
      seen.access.place = {site, operation, a.shapes.number_of(shape_of(*seen.tensor))};
      if (const View *view = view_of(a, seen.tensor)) {
        seen.access.born = view->born;
        seen.access.like = view->like;
      }
      functions->accessed(engine, &access);
      report_use_after_free(engine, access);
      // Autograd hands gradients from stream to stream, and calls the allocator's recordStream() by
      // itself, which PyTorch's own allocator does not show.
      if (is_backward && a.gradients.count(access.address) != 0) {
        functions->marked(engine, access.address, access.stream, 1, site);
      }
    }
  });
}

void leave_to_pytorch(bool on)
{
  thread.pytorchs_own += on ? 1 : -1;
}

void observe_operators()
{
  has_graphs.store(false);
  register_callback(false);
}

void observe_views()
{
  if (!has_graphs.exchange(true)) {
    register_callback(true);
  }
}

void stop_observing()
{
  at::removeCallback(callback);
  callback = at::INVALID_CALLBACK_HANDLE;
}

} // namespace esper::auditing
