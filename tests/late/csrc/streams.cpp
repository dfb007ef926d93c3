#include "streams.h"

#include <ATen/Parallel.h>

#include "timing.h"

namespace late {

void merge(Clock& to, const Clock& from) {
  for (auto& [number, tick] : from) {
    auto& own = to[number];
    own = std::max(own, tick);
  }
}

std::mutex& order() { static auto* m = new std::mutex; return *m; }
Clock& host_seen() { static auto* c = new Clock; return *c; }

// ------------------------------------------------------------------------------------------------------------- queues

std::string Queue::name() const {
  return "late:" + std::to_string(device) + (id ? " stream " + std::to_string(id) : " default stream");
}

void Queue::push(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    pushed_++;
    if (!started_) std::thread([this] { work(); }).detach();
    started_ = true;
  }
  wake_.notify_one();
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_ == pushed_ && ready_ <= host_now();
}

void Queue::drain() {
  Time until;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    auto end = pushed_;
    done_.wait(lock, [&] { return finished_ >= end; });
    until = ready_;
  }
  host_reaches(until);
}

void Queue::work() {
  c10::ParallelGuard serial(true);
  std::minstd_rand random(env("LATE_SEED", 1) * 7919 + number);
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    const long delay = g_delay, every = g_every;
    if (delay > 0 && every > 0 && random() % every == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random() % delay));
    task();
    task = nullptr;  // What it held is dropped before anybody hears that it is done.
    {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_++;
    }
    done_.notify_all();
  }
}

void Queue::spend(const char* kind, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto start = std::max(ready_, host_now());
  ready_ = start + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  note(*this, kind, start, ready_);
}

void Queue::not_before(Time time) {
  std::lock_guard<std::mutex> lock(mutex_);
  ready_ = std::max(ready_, time);
}

Time Queue::ready() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::max(ready_, host_now());
}

void Queue::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  ready_ = Time{};
}

namespace {
std::mutex& making() { static auto* m = new std::mutex; return *m; }
std::vector<Queue*>& made() { static auto* v = new std::vector<Queue*>; return *v; }
std::string& device_error() { static auto* s = new std::string; return *s; }  // guarded by order()
}  // namespace

Queue* queue_of(int device, int id) {
  static std::array<std::array<std::atomic<Queue*>, POOL + 1>, MOST> known{};
  auto& place = known.at(device).at(id);
  if (auto* queue = place.load()) return queue;
  std::lock_guard<std::mutex> lock(making());
  if (!place.load()) {
    made().push_back(new Queue(device, id, static_cast<int>(made().size())));
    place = made().back();
  }
  return place.load();
}

std::vector<Queue*> queues() {
  std::lock_guard<std::mutex> lock(making());
  return made();
}

void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < COUNT, "late: invalid device ordinal ", device, ", there are ", COUNT, " devices");
  t_device = device;
}

void failed(const std::string& error) {
  std::lock_guard<std::mutex> lock(order());
  if (device_error().empty()) device_error() = error;
}

void host_waits(Queue* queue) {
  g_waits++;
  Clock at;
  {
    std::lock_guard<std::mutex> lock(order());
    at = queue->seen;
  }
  queue->drain();
  std::string error;
  {
    std::lock_guard<std::mutex> lock(order());
    merge(host_seen(), at);
    error.swap(device_error());
  }
  TORCH_CHECK(error.empty(), "late device error (from work launched before): ", error);
}

// ------------------------------------------------------------------------------------------------------------- events

bool Mark::reached() {
  std::lock_guard<std::mutex> lock(mutex);
  return done && at <= host_now();
}

void Mark::wait() {
  Time until;
  {
    std::unique_lock<std::mutex> lock(mutex);
    cv.wait(lock, [&] { return done; });
    until = at;
  }
  host_reaches(until);
}

std::shared_ptr<Mark> record(Queue* queue) {
  auto mark = std::make_shared<Mark>();
  if (on_clock()) {
    mark->at = queue->ready();
    mark->done = true;
    return mark;
  }
  std::lock_guard<std::mutex> lock(order());
  mark->clock = queue->seen;
  merge(mark->clock, host_seen());
  queue->push([mark] {
    {
      std::lock_guard<std::mutex> lock(mark->mutex);
      mark->done = true;
      mark->at = host_now();
    }
    mark->cv.notify_all();
  });
  return mark;
}

void block(Queue* queue, const std::shared_ptr<Mark>& mark) {
  if (on_clock()) return queue->not_before(mark->at);
  std::lock_guard<std::mutex> lock(order());
  merge(queue->seen, mark->clock);
  queue->push([mark] { mark->wait(); });
}

}  // namespace late
