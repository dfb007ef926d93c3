// Uses of memory that no event orders. Vector clocks find them whatever the timing: a use is a hazard if the stream
// that makes it is not certain to run behind an earlier one, even where this time it did.
#pragma once

#include "streams.h"

namespace late {

struct Use {
  int queue = -1;  // none yet
  uint64_t tick = 0;
  std::string what;
};

struct Block;  // of memory; see memory.h
struct Used { void* data; bool writes; };

/// Note that work of that name reads and writes memory, and return its hazards. Under order().
std::vector<std::string> used(Queue* queue, const std::string& what, const std::vector<Used>& uses);
/// Return the hazards of freeing a block now. Under order().
std::vector<std::string> freed(const Block& block);

/// Keep hazards until they are asked for. Not under order(), because it takes the interpreter's lock.
void report(std::vector<std::string> hazards);
std::vector<std::string> reported();

inline std::function<std::string()> python_stack = [] { return std::string(); };  // set where Python is known

}  // namespace late
