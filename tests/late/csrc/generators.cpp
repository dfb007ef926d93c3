#include "generators.h"

#include "streams.h"

namespace late {

namespace {

constexpr size_t BYTES = 16;  // of a state

// Launching advances the offset, so that no state waits for the device.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit Generator(int device)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == BYTES, "the state of a generator of late has ", BYTES, " bytes, but got ", state.numel());
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({BYTES}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<Generator>(device < 0 ? t_device : device); }

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>;
    for (int k = 0; k < COUNT; k++) v->push_back(new_generator(k));
    return v;
  }();
  return all->at(device < 0 ? t_device : device);
}

at::Generator drawn_from(at::Generator own) {
  uint64_t seed, offset;
  {
    std::lock_guard<std::mutex> lock(own.mutex());
    auto* impl = own.get<Generator>();
    seed = impl->seed_;
    offset = impl->offset_;
    impl->offset_ += 4;
  }
  // The finalizer of splitmix64 (Steele, Lea and Flood, 2014): neighbouring offsets give unrelated seeds.
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + offset + 1;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return at::make_generator<at::CPUGeneratorImpl>(x ^ (x >> 31));
}

}  // namespace late
