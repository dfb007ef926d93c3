#include "memory.h"

#include <sys/mman.h>

#include "timing.h"

namespace late {

namespace {

// All under order().
std::map<char*, Block*>& blocks() { static auto* m = new std::map<char*, Block*>; return *m; }
std::map<std::tuple<Queue*, size_t, bool>, std::vector<Block*>>& unused() {
  static auto* m = new std::map<std::tuple<Queue*, size_t, bool>, std::vector<Block*>>;
  return *m;
}
c10::CachingDeviceAllocator::DeviceStats g_stats[MOST];

constexpr size_t AGGREGATE = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// On a clock nothing is written. Pages that nobody touches take no memory of the host, and read as zeros; but calloc
/// writes zeros into what it takes from the heap.
void* untouched(size_t size) {
  if (size < 4096) return std::calloc(size, 1);
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

/// Spoil a block behind all work of its stream, and let that stream have it again. Under order().
void give_back(Block* b) {
  if (!on_clock() && !b->simulated) b->home->push([p = b->pointer, n = b->size] { std::memset(p, 0xFF, n); });  // NaN
  b->written = Use();
  b->read.clear();
  b->recorded.clear();
  unused()[{b->home, b->size, b->simulated}].push_back(b);
}

void free_memory(void* pointer) {
  if (!pointer) return;
  std::vector<std::string> hazards;
  {
    std::lock_guard<std::mutex> lock(order());
    auto* b = blocks().at(static_cast<char*>(pointer));
    g_stats[b->home->device].allocated_bytes[AGGREGATE].decrease(b->asked);
    if (on_clock()) return give_back(b);
    hazards = freed(*b);
    std::vector<Queue*> others;
    for (auto* queue : b->recorded)
      if (queue != b->home) others.push_back(queue);
    b->pending = static_cast<int>(others.size());
    if (others.empty()) give_back(b);
    for (auto* queue : others)
      queue->push([b] {
        std::lock_guard<std::mutex> lock(order());
        if (--b->pending == 0) give_back(b);
      });
  }
  report(std::move(hazards));
}

struct Allocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t size) override {
    auto device = c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(t_device));
    if (size == 0) return {nullptr, nullptr, &free_memory, device};
    auto* home = current(t_device);
    size_t rounded = (size + 511) / 512 * 512;
    std::lock_guard<std::mutex> lock(order());
    auto& stats = g_stats[t_device];
    if (!on_clock() && stats.allocated_bytes[AGGREGATE].current + static_cast<int64_t>(size) > MEMORY)
      C10_THROW_ERROR(OutOfMemoryError, "late:" + std::to_string(t_device) + " is out of memory: " + std::to_string(size) + " bytes were asked for");
    auto& there = unused()[{home, rounded, on_clock()}];
    Block* b;
    if (!there.empty()) {
      b = there.back();
      there.pop_back();
    } else {
      void* p = on_clock() ? untouched(rounded) : std::aligned_alloc(512, rounded);
      TORCH_CHECK(p, "the host is out of memory");
      if (!on_clock()) std::memset(p, 0xFF, rounded);
      b = new Block{static_cast<char*>(p), rounded, on_clock(), home};
      blocks()[b->pointer] = b;
      stats.reserved_bytes[AGGREGATE].increase(rounded);
    }
    b->asked = size;
    stats.allocated_bytes[AGGREGATE].increase(size);
    return {b->pointer, b->pointer, &free_memory, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t n) const override {
    auto* queue = current(t_device);
    queue->push([=] { std::memcpy(to, from, n); });
    host_waits(queue);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (on_clock()) return;
    std::lock_guard<std::mutex> lock(order());
    if (auto* b = block_at(data.get())) b->recorded.insert(queue_of(stream.device_index(), static_cast<int>(stream.id())));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(order());
    return g_stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(order());
    g_stats[device].allocated_bytes[AGGREGATE].reset_peak();
    g_stats[device].reserved_bytes[AGGREGATE].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {MEMORY - allocated(device), MEMORY};
  }
};

bool registered_allocator [[maybe_unused]] = (c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator(), 1), true);

// --------------------------------------------------------------------------------------------- pinned memory of the host

std::map<char*, size_t>& pinned() { static auto* s = new std::map<char*, size_t>; return *s; }

void free_pinned(void* p) {
  std::lock_guard<std::mutex> lock(order());
  pinned().erase(static_cast<char*>(p));
  std::free(p);
}

struct HostAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) {
      p = std::malloc(n);
      TORCH_CHECK(p, "the host is out of memory");
      std::lock_guard<std::mutex> lock(order());
      pinned()[static_cast<char*>(p)] = n;
    }
    return {p, p, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return at::HostStats(); }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator g_host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &g_host_allocator)

}  // namespace

c10::DeviceAllocator& allocator() { static auto* a = new Allocator; return *a; }
at::HostAllocator& pinned_allocator() { return g_host_allocator; }

Block* block_at(const void* pointer) {
  auto it = blocks().upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (it == blocks().begin()) return nullptr;
  auto* b = (--it)->second;
  return pointer < b->pointer + b->size ? b : nullptr;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(order());
  auto* p = static_cast<char*>(const_cast<void*>(data));
  auto it = pinned().upper_bound(p);
  if (it == pinned().begin()) return false;
  --it;
  return p < it->first + it->second;
}

int64_t allocated(int device) {
  std::lock_guard<std::mutex> lock(order());
  return g_stats[device].allocated_bytes[AGGREGATE].current;
}

}  // namespace late
