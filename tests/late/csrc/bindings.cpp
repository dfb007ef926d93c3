// What Python sees.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "generators.h"
#include "launch.h"
#include "memory.h"
#include "timing.h"

namespace py = pybind11;

namespace late {

namespace {

std::string stack_of_this_thread() {
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  try {
    auto thread = py::module_::import("threading").attr("current_thread")().attr("name").cast<std::string>();
    py::list lines = py::module_::import("traceback").attr("format_stack")();
    std::string text = "    in thread " + thread + "\n";
    for (auto line : lines) text += "    " + line.cast<std::string>();
    return text;
  } catch (py::error_already_set&) {
    return "";
  }
}

void sleep(long microseconds) {
  auto* queue = current(t_device);
  if (on_clock()) return queue->spend("kernel", microseconds * 1e-6);
  launch(queue, "sleep", {}, [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

/// Let a stream wait until it is released.
std::shared_ptr<Mark> hold(int device, int id) {
  auto mark = std::make_shared<Mark>();
  block(queue_of(device, id), mark);
  return mark;
}

void release(Mark& mark) {
  {
    std::lock_guard<std::mutex> lock(mark.mutex);
    mark.done = true;
  }
  mark.cv.notify_all();
}

std::vector<std::string> streams() {
  std::vector<std::string> lines;
  for (auto* q : queues()) lines.push_back(q->name() + ": " + std::to_string(q->ticks) + (q->idle() ? "" : " BUSY"));
  return lines;
}

}  // namespace

}  // namespace late

PYBIND11_MODULE(late_C, m) {
  using namespace late;
  python_stack = stack_of_this_thread;
  m.def("device_count", [] { return COUNT; });
  m.def("current_device", [] { return t_device; });
  m.def("set_device", &set_device);
  m.def("default_generator", [](int d) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(d)));
  });
  py::class_<Mark, std::shared_ptr<Mark>>(m, "Hold").def("release", &release);
  m.def("hold", &hold);
  m.def("sleep", &late::sleep);
  m.def("delays", [](long most, long every) {
    auto before = std::make_tuple(g_delay.load(), g_every.load());
    g_delay = most;
    g_every = every;
    return before;
  });
  m.def("hazards", &reported);
  m.def("counts", [] { return std::make_tuple(g_launches.load(), g_synced.load(), g_waits.load()); });
  m.def("streams", &streams);
  m.def("set_clock", [](double flops, double bandwidth, double link, double kernel, double latency, bool wall) {
    py::gil_scoped_release no_gil;
    set_clock(Speed{flops, bandwidth, link, kernel, latency, wall});
  });
  m.def("unset_clock", [] {
    py::gil_scoped_release no_gil;
    set_clock(std::nullopt);
  });
  m.def("now", [] { return std::chrono::duration<double>(host_now().time_since_epoch()).count(); });
  m.def("intervals", [] {
    std::vector<std::tuple<int, int, std::string, double, double>> all;
    for (auto& one : intervals()) all.emplace_back(one.device, one.stream, one.kind, one.start, one.end);
    return all;
  });
}
