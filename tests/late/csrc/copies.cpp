// Copies: within a device, between devices, from and to the host.
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>

#include "launch.h"
#include "memory.h"
#include "timing.h"

namespace late {

namespace {

void copy(const Span& from, const Span& to) { to.on_cpu().copy_(from.on_cpu()); }

void copy_on_device(const at::Tensor& self, const at::Tensor& dst) {
  auto* queue = current(self.device().index());
  if (on_clock()) return queue->spend("kernel", seconds_of("copy_", {self}, {dst}));
  Span from(self), to(dst);
  launch(queue, "copy_", {{from.data, false}, {to.data, true}}, [from, to] { copy(from, to); });
}

/// As PyTorch does for CUDA: on the current stream of the source, between two waits.
void copy_between_devices(const at::Tensor& self, const at::Tensor& dst) {
  auto *source = current(self.device().index()), *target = current(dst.device().index());
  block(source, record(target));
  if (on_clock()) {
    source->spend("copy", seconds_of_copy(self.nbytes()));
  } else {
    Span from(self), to(dst);
    launch(source, "copy_ to " + dst.device().str(), {{from.data, false}, {to.data, true}}, [from, to] { copy(from, to); });
  }
  block(target, record(source));
}

void copy_from_host(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto* queue = current(dst.device().index());
  if (on_clock()) {
    queue->spend("copy", seconds_of_copy(self.nbytes()));
  } else {
    // What is not pinned is read before the call returns.
    at::Tensor source = !non_blocking || self.is_pinned() ? self : self.clone();
    uint64_t kept = non_blocking ? keep(source) : 0;
    Span from(source), to(dst);
    launch(queue, "copy_ from the host", {{to.data, true}}, [=] { copy(from, to); can_go(kept); });
  }
  if (!non_blocking) host_waits(queue);
}

void copy_to_host(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto* queue = current(self.device().index());
  if (on_clock()) {
    queue->spend("copy", seconds_of_copy(self.nbytes()));
    // Writing takes time of the host, which a copy to pinned memory does not.
    if (!non_blocking || !dst.is_pinned()) dst.zero_();
  } else {
    uint64_t kept = non_blocking ? keep(dst) : 0;
    Span from(self), to(dst);
    launch(queue, "copy_ to the host", {{from.data, false}}, [=] { copy(from, to); can_go(kept); });
  }
  if (!non_blocking || !dst.is_pinned()) host_waits(queue);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  const c10::DeviceGuard guard(is_late(self) ? self.device() : dst.device());
  if (!is_late(self)) {
    copy_from_host(self, dst, non_blocking);
  } else if (!is_late(dst)) {
    copy_to_host(self, dst, non_blocking);
  } else if (self.device() == dst.device()) {
    copy_on_device(self, dst);
  } else {
    copy_between_devices(self, dst);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto host = at::empty({}, self.options().device(at::kCPU));
  copy_from(self.reshape({}), host, false);
  return at::native::_local_scalar_dense_cpu(host);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// Copies take views that are conjugate, or negative, as they are: PyTorch would copy these first, and so without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

}  // namespace late
