"""`torch.late`: the names of `torch.cuda` that programs use, for the devices `late:0`, `late:1`, ..."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["make"]


def make(C: Any) -> types.ModuleType:
    """Return the module, given the library."""
    late = types.ModuleType("torch.late")

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        current: int = C.current_device()
        return current if found is None else found

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Stream:
            return super().__new__(cls, device=torch.device("late", index(device)), priority=priority)

    def Event(enable_timing: bool = False, **options: Any) -> torch.Event:
        return torch.Event("late", enable_timing=enable_timing)

    class StreamContext:
        """As that of `torch.cuda`: a new object for each block, so that threads can share the stream."""

        def __init__(self, stream: torch.Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.device = C.current_device()
                C.set_device(self.stream.device.index)
                self.before = torch.accelerator.current_stream(self.stream.device)
                torch.accelerator.set_stream(self.stream)

        def __exit__(self, *exc_info: object) -> None:
            if self.stream is not None:
                torch.accelerator.set_stream(self.before)
                C.set_device(self.device)

    class device:
        def __init__(self, device: Any) -> None:
            self.index = index(device)

        def __enter__(self) -> None:
            self.before = C.current_device()
            C.set_device(self.index)

        def __exit__(self, *exc_info: object) -> None:
            C.set_device(self.before)

    generators = tuple(C.default_generator(k) for k in range(C.device_count()))

    def default_stream(device: Any = None) -> torch.Stream:
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return torch.Stream(stream_id=0, device_index=index(device), device_type=kind)

    def manual_seed(seed: int) -> None:
        generators[C.current_device()].manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def properties(device: Any = None) -> types.SimpleNamespace:
        memory = torch.accelerator.get_memory_info(index(device))[1]
        return types.SimpleNamespace(name="late", total_memory=memory, major=0, minor=0, multi_processor_count=1)

    names: dict[str, Any] = {
        # torch.utils.checkpoint keeps the state of generators only where it finds this.
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        # Devices.
        "device": device,
        "device_count": C.device_count,
        "current_device": C.current_device,
        "set_device": lambda device: C.set_device(index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "get_device_name": lambda device=None: "late",
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (0, 0),
        # Streams.
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device("late", index(device))),
        "default_stream": default_stream,
        "set_stream": torch.accelerator.set_stream,
        "_sleep": lambda cycles: C.sleep(int(cycles) // 1000),  # as on a GPU of 1 GHz
        # Random numbers.
        "default_generators": generators,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: generators[C.current_device()].initial_seed(),
        "get_rng_state": lambda device="late": generators[index(device)].get_state(),
        "set_rng_state": lambda state, device="late": generators[index(device)].set_state(state),
        # Memory.
        "empty_cache": torch.accelerator.empty_cache,
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(index(device)),
        # Autocast.
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    statistics = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"]
    for name in [*statistics, "reset_peak_memory_stats"]:
        of_accelerator = getattr(torch.accelerator, name)
        names[name] = lambda device=None, of_accelerator=of_accelerator: of_accelerator(index(device))
    for name, value in names.items():
        setattr(late, name, value)
    return late
