// Memory is handed out again in the order of the stream that allocated it, as by CUDA's allocator.
#pragma once

#include "hazards.h"

namespace late {

struct Block {
  char* pointer;
  size_t size;
  bool simulated;             // made on the clock, and read by nobody
  Queue* home;                // the stream that allocates it
  size_t asked = 0;
  Use written;
  std::map<int, Use> read;    // the last reading of each queue
  std::set<Queue*> recorded;  // by record_stream
  int pending = 0;            // recorded streams that are not through yet
};

Block* block_at(const void* pointer);  // under order()

c10::DeviceAllocator& allocator();
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* data);
int64_t allocated(int device);

}  // namespace late
