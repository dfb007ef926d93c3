// Streams are queues with a thread; events are marks in queues.
#pragma once

#include "settings.h"

namespace late {

using Time = std::chrono::steady_clock::time_point;
using Clock = std::map<int, uint64_t>;  // a vector clock: how far each queue is certain to be, by its number

void merge(Clock& to, const Clock& from);

struct Queue {
  const int device, id, number;
  Clock seen;          // what work that is queued next is certain to find finished; guarded by order()
  uint64_t ticks = 0;  // pieces of work so far; guarded by order()

  Queue(int device, int id, int number) : device(device), id(id), number(number) {}
  std::string name() const;
  void push(std::function<void()> task);
  bool idle();
  void drain();

  // On the clock, a queue is only the time at which it is through with its work.
  void spend(const char* kind, double seconds);
  void not_before(Time time);
  Time ready();
  void forget();  // what is not through yet

 private:
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::function<void()>> tasks_;
  uint64_t pushed_ = 0, finished_ = 0;
  bool started_ = false;
  Time ready_{};
  void work();
};

std::mutex& order();  // guards vector clocks, blocks of memory and hazards
Queue* queue_of(int device, int id);
std::vector<Queue*> queues();
Clock& host_seen();  // guarded by order()

inline thread_local int t_device = 0;
inline thread_local std::array<int, MOST> t_streams{};  // zero is the default stream
inline Queue* current(int device) { return queue_of(device, t_streams[device]); }
void set_device(int device);

/// Wait for what is queued now, and raise what has failed.
void host_waits(Queue* queue);
void failed(const std::string& error);

struct Mark {
  std::mutex mutex;
  std::condition_variable cv;
  bool done = false;
  Time at;      // of the device; on a clock it is known before it has come
  Clock clock;
  bool reached();
  void wait();  // in the thread of a stream, or of the host
};

std::shared_ptr<Mark> record(Queue* queue);
void block(Queue* queue, const std::shared_ptr<Mark>& mark);

}  // namespace late
