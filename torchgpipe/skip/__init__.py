"""Skip connections that go straight from the partition that stashes a tensor to the one that pops it."""

from torchgpipe.skip.drive import pop, stash
from torchgpipe.skip.namespace import Namespace
from torchgpipe.skip.skippable import Skippable, skippable
from torchgpipe.skip.verify import verify_skippables

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
