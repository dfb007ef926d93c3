"""``python -m torchgpipe``: the commands of the library."""

from __future__ import annotations

from torchgpipe.command.main import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
