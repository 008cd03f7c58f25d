"""Many cases in one test: a failure names its case."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(label: object) -> Iterator[None]:
    """Add the label of a case to an error from the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {label}")
        raise
