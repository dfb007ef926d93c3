#include "hazards.h"

#include "memory.h"

namespace late {

namespace {

std::vector<std::string>& found() { static auto* v = new std::vector<std::string>; return *v; }

bool before(const Use& use, const Clock& seen) {
  auto it = seen.find(use.queue);
  return use.queue < 0 || (it != seen.end() && it->second >= use.tick);
}

std::string told(const Use& use) { return use.what + " on " + queues()[use.queue]->name(); }

std::string told(const Block& block) {
  return "memory of " + std::to_string(block.asked) + " bytes of " + block.home->name();
}

}  // namespace

std::vector<std::string> used(Queue* queue, const std::string& what, const std::vector<Used>& uses) {
  std::vector<std::string> hazards;
  std::string stack = STACKS ? python_stack() : "";
  merge(queue->seen, host_seen());
  Use own{queue->number, ++queue->ticks, what + (stack.empty() ? "" : "\n" + stack)};
  auto unordered = [&](const Use& its) { return its.queue != queue->number && !before(its, queue->seen); };
  for (auto& use : uses) {
    auto* b = use.data ? block_at(use.data) : nullptr;
    if (!b) continue;
    const std::string here = what + " on " + queue->name(), size = " (" + told(*b) + ")";
    if (unordered(b->written))
      hazards.push_back(here + (use.writes ? " writes" : " reads") + " what " + told(b->written) + " writes, without waiting for it" + size);
    if (use.writes) {
      for (auto& [_, its] : b->read)
        if (unordered(its)) hazards.push_back(here + " overwrites what " + told(its) + " may still read" + size);
      b->written = own;
      b->read.clear();
    } else {
      b->read[queue->number] = own;
    }
  }
  queue->seen[queue->number] = own.tick;
  return hazards;
}

std::vector<std::string> freed(const Block& block) {
  std::vector<std::string> hazards;
  auto check = [&](const Use& use) {
    if (use.queue < 0 || use.queue == block.home->number || before(use, block.home->seen) || before(use, host_seen())) return;
    if (!block.recorded.count(queues()[use.queue]))
      hazards.push_back(told(block) + " is freed while " + told(use) + " may still use it, without record_stream");
  };
  check(block.written);
  for (auto& [_, use] : block.read) check(use);
  return hazards;
}

void report(std::vector<std::string> hazards) {
  if (hazards.empty()) return;
  std::string stack = python_stack();
  std::lock_guard<std::mutex> lock(order());
  for (auto& hazard : hazards) found().push_back(hazard + "\n" + stack);
}

std::vector<std::string> reported() {
  std::lock_guard<std::mutex> lock(order());
  return std::exchange(found(), {});
}

}  // namespace late
