// A clock: the time that work would take on a device of a given speed. Nothing is computed.
//
// Each stream is then only a time at which it is through with its work. Work that is launched begins at that time, or
// now, and what a stream waits for moves its time. Nobody sleeps but a host that waits, and it sleeps until a time, so
// that errors do not add up.
//
// The host's time is that of the wall, or that of the processor: what all threads of this process have computed, and the
// times that they have waited for, which are skipped. Other programs do not count then. The threads of Python compute
// one at a time, so the two agree on an idle machine, except for the time that it takes to wake a thread.
#pragma once

#include "streams.h"

namespace late {

struct Speed {
  double flops = 0;      // FLOP a second of products of matrices
  double bandwidth = 0;  // bytes a second of the device's memory
  double link = 0;       // bytes a second between devices, and to the host
  double kernel = 0;     // seconds at least, of a kernel
  double latency = 0;    // seconds, of a copy
  bool wall = false;     // the host's time is that of the wall
};

struct Interval {
  int device, stream;
  const char* kind;  // 'kernel' or 'copy'
  double start, end;
};

/// Switch the clock on or off. Work is finished before, and time that has not come is forgotten.
void set_clock(const std::optional<Speed>& speed);
inline std::atomic<bool> g_on_clock{false};
inline bool on_clock() { return g_on_clock.load(std::memory_order_relaxed); }

/// Return the host's time, on the clock or off it, and wait until it has come.
Time host_now();
void host_reaches(Time time);

/// Return the seconds of an operator, given what it takes and what it gives.
double seconds_of(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results);
double seconds_of_copy(size_t bytes);

/// Note what a stream does from when to when. Neighbours of one kind are one interval.
void note(const Queue& queue, const char* kind, Time start, Time end);
/// Return what was noted since the last call.
std::vector<Interval> intervals();

}  // namespace late
