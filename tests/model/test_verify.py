"""Only a Sequential with a balance that fits it passes verification."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.model.verify import verify_balance


@given(counts=st.lists(st.integers(-1, 4), max_size=5), layers=st.integers(0, 12))
def test_a_balance_that_fits_is_returned_as_a_list_and_any_other_is_refused(counts: list[int], layers: int) -> None:
    fits = sum(counts) == layers and all(count > 0 for count in counts)
    try:
        assert verify_balance(iter(counts), layers) == counts
    except ValueError as error:
        assert not fits
        first = str(error).splitlines()[0]
        assert str(layers) in first and (str(sum(counts)) in first or str(counts) in first)
    else:
        assert fits
