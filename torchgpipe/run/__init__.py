"""A run of the model's own forward on one micro-batch, in place of a trace; it goes from column to column.

Words of this room, beside those of the field:

    frame      a thread that runs the model's own forward for one micro-batch: stops at doors, imports what it uses
    glue       the operations between two modules of the spine
    visitor    whoever runs the model in a thread, and is asked at each door: a frame, a recomputation at backward, or a
               run in one piece
    column     what runs as one: a partition, or neighbouring partitions on one device; j is a column
    home       the column in which a tensor was computed
    export     a tensor that other columns use; an import stands for it there, at the beginning of a graph of its own
"""

__all__: list[str] = []
