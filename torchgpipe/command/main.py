"""Read a command line, run the command, and print what it returns: text for people, or JSON for programs.

A command adds its arguments to a parser, and its ``run`` returns a `Report`. An error is one line on standard error,
and the exit status 1; what a command has begun is gone when it is interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

from torchgpipe.command import environment, fit, links, plan, schedule

__all__ = ["main"]

_COMMANDS = {"fit": fit, "plan": plan, "schedule": schedule, "links": links, "env": environment}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status.

    Args:
        arguments: the command line (default: that of the process)
    """
    parser = _Parser(prog="python -m torchgpipe", description="Pipelines over the devices of this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        told = (command.__doc__ or "").partition("\n")[0]
        own = commands.add_parser(name, help=told[:1].lower() + told[1:].rstrip("."), description=told)
        command.add_arguments(own)
        own.add_argument("--json", action="store_true", help="print JSON, for programs")
        own.add_argument("--traceback", action="store_true", help="of an error, print all that Python tells")
    given = parser.parse_args(arguments)
    if arguments is None:  # What libraries warn of is not about the user's command.
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    try:
        report = _COMMANDS[given.command].run(given)
        print(json.dumps(report.data, indent=1) if given.json else report.text, flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # Such as that of `| head`; Python would print an error as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if given.traceback:
            raise
        kind, where = ("", "") if type(error) is ValueError else (f"{type(error).__name__}: ", _place_of(error))
        print(f"{parser.prog} {given.command}: {kind}{' '.join(str(error).split())}{where}", file=sys.stderr)
        return 1
    return 0


def _place_of(error: BaseException) -> str:
    """Return where a model has raised an error: the last line that is neither PyTorch's nor of this library."""
    ours = ("<", os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f", in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
