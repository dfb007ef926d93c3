"""Skip connections: a skip goes straight from the partition that stashes it to the partition that pops it."""

from torchgpipe.skip.drive import pop, stash
from torchgpipe.skip.namespace import Namespace
from torchgpipe.skip.skippable import Skippable, skippable
from torchgpipe.skip.verify import verify_skippables

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
