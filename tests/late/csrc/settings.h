// Settings from the environment, and those that tests change.
#pragma once

#include "torch.h"

namespace late {

inline long env(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atol(value) : otherwise;
}

constexpr int MOST = 64;                                // devices
constexpr int POOL = 32;                                // streams of a device, handed out in turn, as CUDA does
inline const int COUNT = static_cast<int>(std::min(env("LATE_DEVICES", 4), long(MOST)));
inline const bool SYNC = env("LATE_SYNC", 0);           // the host waits for each piece of work
inline const bool EAGER = env("LATE_EAGER", 0);         // no shapes from the meta device: the host works itself
inline const bool STACKS = env("LATE_STACKS", 0);       // hazards tell where work was queued
inline const bool TRACE = env("LATE_TRACE", 0);         // each piece of work is printed
inline const bool OLD = env("LATE_OLD", 0);             // `.data` cannot change the device
inline const long MEMORY = env("LATE_MEMORY", 4096) << 20;  // bytes of a device; a clock has no limit

inline std::atomic<long> g_delay{env("LATE_DELAY", 200)};  // microseconds at most, for one piece of work in g_every
inline std::atomic<long> g_every{env("LATE_EVERY", 3)};

inline std::atomic<long> g_launches{0};  // pieces of work
inline std::atomic<long> g_synced{0};    // operators whose shapes depend on data: the host worked itself
inline std::atomic<long> g_waits{0};     // times that the host waited for a stream

}  // namespace late
