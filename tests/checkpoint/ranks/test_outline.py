"""Errors for states that the ranks do not have in common."""

import pytest

from tensorkeep.checkpoint.ranks.outline import merge_skeletons
from tensorkeep.errors import RanksDisagreeError
from tensorkeep.state.tree import flatten


def test_bytes_that_differ_are_shown_as_they_are() -> None:
    skeletons = [flatten({"loader": {"position": text}}).skeleton for text in (b"row 5", b"row 6")]
    with pytest.raises(RanksDisagreeError, match="differs between ranks 0 and 1: b'row 5' and b'row 6'"):
        merge_skeletons(skeletons)
