"""What the papers have published, each row beside ours.

Each part is a table of a paper or of torchgpipe's documentation. It takes the published setting as it is, and says what
comes out of it here: counted or simulated where it needs more devices than there are.

    memory      parameters and memory of AmoebaNet-D and U-Net (`published_memory.py`)

    python -m benchmarks.published    # half a minute, on any machine
"""

from __future__ import annotations

from benchmarks import published_memory
from benchmarks.program import Part, Program

PARTS = {
    "memory": Part(
        "published:memory",
        published_memory.measure,
        {"memory, counted on the meta device, and published": published_memory.published_memory},
        cpu=True,
    )
}


def main() -> None:
    Program("published", __doc__, PARTS).run()


if __name__ == "__main__":
    main()
