#include "fence.h"

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

#include "../start/the_core.h"
#include "sites.h"

namespace esper::fence
{

namespace
{

using Clock = std::chrono::steady_clock;

constexpr size_t kept = size_t{1} << 16; // frees

struct Live {
  uint32_t allocated; // site
  std::optional<audit_finding> in_use;
};

struct Entry {
  Freed freed;
  Clock::time_point when;
};

struct Fence {
  std::mutex mutex;
  std::unordered_map<uintptr_t, Live> live;
  std::map<uintptr_t, Entry> freed;                 // by address
  std::deque<std::pair<uintptr_t, uint64_t>> order; // address and number, the oldest first
  uint64_t frees = 0;
};

Fence &state()
{
  static auto *instance = new Fence();
  return *instance;
}

Freed told(const Entry &entry)
{
  Freed freed = entry.freed;
  freed.seconds = std::chrono::duration<double>(Clock::now() - entry.when).count();
  return freed;
}

bool find(void *ptr, esper_block_info &block)
{
  esper_core *made = core_if_made();
  return made != nullptr && capi().find_block(made, ptr, &block) == ESPER_OK && block.fenced != 0;
}

} // namespace

void turn_on()
{
  Fence &f = state();
  {
    std::lock_guard<std::mutex> lock(f.mutex);
    f.live.clear();
    f.freed.clear();
    f.order.clear();
    f.frees = 0;
  }
  check(capi().fence(core(), 1), "beginning a fence");
  set_watcher(Watcher::FENCE, true);
}

void turn_off()
{
  if (set_watcher(Watcher::FENCE, false)) {
    if (esper_core *made = core_if_made()) {
      capi().fence(made, 0);
    }
  }
}

std::optional<Freed> freed_at(uintptr_t address)
{
  Fence &f = state();
  std::lock_guard<std::mutex> lock(f.mutex);
  auto found = f.freed.upper_bound(address);
  if (found == f.freed.begin()) {
    return std::nullopt;
  }
  --found;
  const Freed &freed = found->second.freed;
  if (address - freed.address >= freed.size) {
    return std::nullopt;
  }
  return told(found->second);
}

std::vector<Freed> last_freed(size_t most, bool only_in_use)
{
  Fence &f = state();
  std::lock_guard<std::mutex> lock(f.mutex);
  std::vector<Freed> last;
  for (auto at = f.order.rbegin(); at != f.order.rend() && last.size() < most; ++at) {
    const auto found = f.freed.find(at->first);
    if (found != f.freed.end() && found->second.freed.number == at->second &&
        (!only_in_use || found->second.freed.in_use)) {
      last.push_back(told(found->second));
    }
  }
  return last;
}

void is_freed_in_use(uintptr_t address, const audit_finding &use)
{
  Fence &f = state();
  std::lock_guard<std::mutex> lock(f.mutex);
  const auto found = f.live.find(address);
  if (found != f.live.end()) {
    found->second.in_use = use;
  }
}

uint64_t frees()
{
  Fence &f = state();
  std::lock_guard<std::mutex> lock(f.mutex);
  return f.frees;
}

void detail::after_malloc(void *ptr)
{
  esper_block_info block;
  if (!find(ptr, block)) {
    return;
  }
  const uint32_t site = sites::now();
  const auto begin = reinterpret_cast<uintptr_t>(block.address);
  Fence &f = state();
  std::lock_guard<std::mutex> lock(f.mutex);
  // The addresses have come round.
  auto old = f.freed.upper_bound(begin + block.size - 1);
  while (old != f.freed.begin()) {
    --old;
    if (old->first + old->second.freed.size <= begin) {
      break;
    }
    old = f.freed.erase(old);
  }
  f.live[begin] = {site, {}};
}

void detail::before_free(void *ptr)
{
  esper_block_info block;
  if (!find(ptr, block)) {
    return;
  }
  const uint32_t site = sites::now();
  const auto begin = reinterpret_cast<uintptr_t>(block.address);
  Fence &f = state();
  std::lock_guard<std::mutex> lock(f.mutex);
  Live was{};
  const auto live = f.live.find(begin);
  if (live != f.live.end()) {
    was = live->second;
    f.live.erase(live);
  }
  f.freed[begin] = {{begin, block.size, block.device, reinterpret_cast<uint64_t>(block.stream),
                     was.allocated, site, ++f.frees, 0, was.in_use},
                    Clock::now()};
  f.order.emplace_back(begin, f.frees);
  if (f.order.size() > kept) {
    const auto [address, number] = f.order.front();
    const auto oldest = f.freed.find(address);
    if (oldest != f.freed.end() && oldest->second.freed.number == number) {
      f.freed.erase(oldest);
    }
    f.order.pop_front();
  }
}

} // namespace esper::fence
