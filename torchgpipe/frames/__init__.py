"""Pipelining any module, with frames in place of a trace; `torchgpipe.pipelined` is the way in.

Words of this room, beside those of the field:

    frame      a thread that runs the model's own forward for one micro-batch: stops at doors, imports what it uses
    spine      the modules of the model that are called one after the other, and are balanced like layers
    glue       the operations between two modules of the spine
    door       what stands in front of a module of the spine, and is called in its place
    visitor    whoever runs the model in a thread, and is asked at each door: a frame, a recomputation at backward, or a
               run in one piece
    part       a module of the spine, or several that cannot be kept apart
    partition  neighbouring parts: what is balanced, and what layouts and errors tell of
    column     what runs as one: a partition, or neighbouring partitions on one device; j is a column
    home       the column in which a tensor was computed
    export     a tensor that other columns use; an import stands for it there, at the beginning of a graph of its own
"""

__all__: list[str] = []
