#include "launch.h"

#include "timing.h"

namespace late {

Span::Span(const at::Tensor& t)
    : data(t.numel() ? t.data_ptr() : nullptr), sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()), conjugate(t.is_conj()), negative(t.is_neg()) {}

at::Tensor Span::on_cpu() const {
  auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  auto tensor = data ? at::from_blob(data, sizes, strides, options) : at::empty_strided(sizes, strides, options);
  tensor._set_conj(conjugate);
  tensor._set_neg(negative);
  return tensor;
}

namespace {

struct Kept {
  std::mutex mutex;
  std::map<uint64_t, at::Tensor> there;
  std::vector<uint64_t> done;
  uint64_t next = 1;
};
Kept& kept() { static auto* k = new Kept; return *k; }

void sweep() {
  std::vector<at::Tensor> gone;  // dropped without the lock
  auto& k = kept();
  std::lock_guard<std::mutex> lock(k.mutex);
  for (auto which : k.done) {
    gone.push_back(std::move(k.there[which]));
    k.there.erase(which);
  }
  k.done.clear();
}

}  // namespace

uint64_t keep(const at::Tensor& t) {
  auto& k = kept();
  std::lock_guard<std::mutex> lock(k.mutex);
  k.there[k.next] = t;
  return k.next++;
}

void can_go(uint64_t which) {
  if (!which) return;
  std::lock_guard<std::mutex> lock(kept().mutex);
  kept().done.push_back(which);
}

void launch(Queue* queue, const std::string& what, const std::vector<Used>& uses, std::function<void()> work) {
  g_launches++;
  sweep();
  std::vector<std::string> hazards;
  {
    std::lock_guard<std::mutex> lock(order());  // Also while queueing: the order of ticks is that of the queue.
    hazards = used(queue, what, uses);
    if (TRACE) fprintf(stderr, "late: %s on %s\n", what.c_str(), queue->name().c_str());
    queue->push([what, work = std::move(work)] {
      try {
        work();
      } catch (const std::exception& error) {
        failed(what + ": " + error.what());
      }
    });
  }
  report(std::move(hazards));
  if (SYNC) queue->drain();
}

}  // namespace late
