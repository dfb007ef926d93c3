// How PyTorch asks for the current device and stream, for events, pinned memory and generators.
#include <ATen/native/Resize.h>

#include "generators.h"
#include "memory.h"
#include "timing.h"

namespace late {

namespace {

struct Event {
  std::shared_ptr<Mark> mark;  // none before it is recorded
  bool timing = false;
};

Event* recorded(void* event) {
  auto* its = static_cast<Event*>(event);
  return its && its->mark ? its : nullptr;
}

/// The host knows now what was finished before the event.
void learn(Mark& mark) {
  std::lock_guard<std::mutex> lock(order());
  merge(host_seen(), mark.clock);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static c10::Device device(int k) { return c10::Device(static_type, static_cast<c10::DeviceIndex>(k)); }
  static c10::Stream stream(int of, int id) { return c10::Stream(c10::Stream::UNSAFE, device(of), id); }
  static int index(c10::Device d) { return d.has_index() ? d.index() : t_device; }
  static Queue* queue(const c10::Stream& s) { return queue_of(s.device_index(), static_cast<int>(s.id())); }

  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device d) const override {
    int old = t_device;
    if (d.has_index()) set_device(d.index());
    return device(old);
  }
  c10::Device getDevice() const override { return device(t_device); }
  void setDevice(c10::Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.has_index()) t_device = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(COUNT); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(c10::Device d) const noexcept override { return stream(index(d), t_streams[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    static std::array<std::atomic<int>, MOST> next{};
    return stream(index(d), 1 + next[index(d)]++ % POOL);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    int old = t_streams[s.device_index()];
    t_streams[s.device_index()] = static_cast<int>(s.id());
    return stream(s.device_index(), old);
  }
  bool queryStream(const c10::Stream& s) const override { return queue(s)->idle(); }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(queue(s)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto* q : queues())
      if (q->device == (device < 0 ? t_device : device)) host_waits(q);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex device, const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == s.device_index(), "an event of device ", int(device), " was recorded on device ", int(s.device_index()));
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->mark = late::record(queue(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (auto* its = recorded(event)) late::block(queue(s), its->mark);
  }
  bool queryEvent(void* event) const override {
    auto* its = recorded(event);
    if (its && !its->mark->reached()) return false;
    if (its) learn(*its->mark);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (auto* its = recorded(event)) {
      its->mark->wait();
      learn(*its->mark);
    }
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    auto *one = recorded(a), *two = recorded(b);
    TORCH_CHECK(one && two, "both events must be recorded");
    TORCH_CHECK(one->timing && two->timing, "both events must be made with enable_timing=True");
    TORCH_CHECK(queryEvent(a) && queryEvent(b), "both events must be completed");
    return std::chrono::duration<double, std::milli>(two->mark->at - one->mark->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    allocator().recordStream(data, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks : at::PrivateUse1HooksInterface {
  static c10::DeviceIndex exchange(int device) {
    int old = t_device;
    set_device(device);
    return static_cast<c10::DeviceIndex>(old);
  }

  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(COUNT); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return exchange(d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchange(d < 0 ? t_device : d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> lock(order());
    auto* b = block_at(data);
    TORCH_CHECK(b, "not memory of late");
    return Guard::device(b->home->device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return new_generator(d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = allocator().allocate(size);
    size_t n = std::min(size, storage.nbytes());
    if (n && !on_clock())
      current(t_device)->push([to = data.get(), from = storage.data(), n] { std::memcpy(to, from, n); });
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};
bool registered_hooks [[maybe_unused]] = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

}  // namespace late
