#include "timing.h"

#include <time.h>

namespace late {

namespace {

Speed g_speed;
std::atomic<int64_t> g_skipped{0};  // nanoseconds that the host has waited, of the time of the processor

int64_t computed() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

struct Notes {
  std::mutex mutex;
  std::vector<Interval> of_all;
  std::unordered_map<int, size_t> last;  // by number of a queue
};
Notes& notes() { static auto* n = new Notes; return *n; }

double bytes_of(const std::vector<at::Tensor>& tensors) {
  double bytes = 0;
  for (auto& t : tensors) bytes += static_cast<double>(t.numel() * t.element_size());
  return bytes;
}

/// The FLOP of a product of matrices: two for each element of the result and each term of its sum.
double flops_of(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results) {
  auto is = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* one) { return name == one; });
  };
  if (is({"mm", "bmm", "mv"})) return 2.0 * results.at(0).numel() * inputs.at(0).size(-1);
  if (is({"addmm", "baddbmm", "addmv"})) return 2.0 * results.at(0).numel() * inputs.at(1).size(-1);
  if (is({"addmm_", "baddbmm_"})) return 2.0 * inputs.at(0).numel() * inputs.at(1).size(-1);
  if (name.rfind("_scaled_dot_product", 0) == 0 && inputs.size() >= 3) {
    // Query by key, and weights by value; backward, where the gradient comes first, takes five products for these two.
    const bool back = name.find("backward") != std::string::npos;
    auto &query = inputs.at(back), &key = inputs.at(1 + back), &value = inputs.at(2 + back);
    double scores = static_cast<double>(query.numel() / query.size(-1)) * key.size(-2);
    return (back ? 2.5 : 1.0) * 2.0 * scores * (query.size(-1) + value.size(-1));
  }
  return 0;
}

}  // namespace

void set_clock(const std::optional<Speed>& speed) {
  g_on_clock = false;
  for (auto* queue : queues()) {
    queue->forget();
    queue->drain();
  }
  if (speed) g_speed = *speed;
  g_on_clock = speed.has_value();
}

Time host_now() {
  if (!on_clock() || g_speed.wall) return std::chrono::steady_clock::now();
  return Time(std::chrono::nanoseconds(computed() + g_skipped));
}

void host_reaches(Time time) {
  if (time <= host_now()) return;
  if (!on_clock() || g_speed.wall) return std::this_thread::sleep_until(time);
  int64_t needed = time.time_since_epoch() / std::chrono::nanoseconds(1) - computed(), skipped = g_skipped;
  while (skipped < needed && !g_skipped.compare_exchange_weak(skipped, needed)) {}
}

double seconds_of(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results) {
  double computing = flops_of(name, inputs, results) / g_speed.flops;
  return g_speed.kernel + std::max(computing, (bytes_of(inputs) + bytes_of(results)) / g_speed.bandwidth);
}

double seconds_of_copy(size_t bytes) { return g_speed.latency + static_cast<double>(bytes) / g_speed.link; }

void note(const Queue& queue, const char* kind, Time start, Time end) {
  auto seconds = [](Time time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); };
  auto& n = notes();
  std::lock_guard<std::mutex> lock(n.mutex);
  auto last = n.last.find(queue.number);
  if (last != n.last.end()) {
    auto& before = n.of_all[last->second];
    if (before.kind == kind && before.end == seconds(start)) {
      before.end = seconds(end);
      return;
    }
  }
  n.last[queue.number] = n.of_all.size();
  n.of_all.push_back({queue.device, queue.id, kind, seconds(start), seconds(end)});
}

std::vector<Interval> intervals() {
  auto& n = notes();
  std::lock_guard<std::mutex> lock(n.mutex);
  n.last.clear();
  return std::exchange(n.of_all, {});
}

}  // namespace late
