"""The order of the cells of a mini-batch, as plain data and pure functions: no tensor, no device."""

from __future__ import annotations

from torchgpipe.schedule.action import Action, Program, verify
from torchgpipe.schedule.clock import clock_cycles
from torchgpipe.schedule.drawing import draw_svg, draw_text
from torchgpipe.schedule.fastest import fastest
from torchgpipe.schedule.programs import NAMES, Schedule, ScheduleName, places_of, program, program_of, verified
from torchgpipe.schedule.simulation import COSTS, Simulation, simulate

__all__ = [
    "COSTS",
    "NAMES",
    "Action",
    "Program",
    "Schedule",
    "ScheduleName",
    "Simulation",
    "clock_cycles",
    "draw_svg",
    "draw_text",
    "fastest",
    "places_of",
    "program",
    "program_of",
    "simulate",
    "verified",
    "verify",
]
