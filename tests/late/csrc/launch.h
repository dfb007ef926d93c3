// Queueing work on tensors whose memory it does not hold.
#pragma once

#include "hazards.h"

namespace late {

inline bool is_late(const at::Tensor& t) { return t.defined() && t.is_privateuseone(); }

/// Where the elements of a tensor lie, without holding its memory: it may be freed before the work has run.
struct Span {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool conjugate, negative;  // Products of matrices take views that are conjugate, or negative, as they are.
  explicit Span(const at::Tensor& t);
  at::Tensor on_cpu() const;
};

/// Queue work, and note what it reads and writes.
void launch(Queue* queue, const std::string& what, const std::vector<Used>& uses, std::function<void()> work);

/// Keep a tensor of the host until work has run. A stream's thread must not drop it, because it may be Python's, and
/// the thread would wait for the interpreter's lock; the thread only says that it can go.
uint64_t keep(const at::Tensor& t);
void can_go(uint64_t kept);

}  // namespace late
