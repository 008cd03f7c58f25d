"""Many cases in one test: whatever fails names its case."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(label: object) -> Iterator[None]:
    """Add the label of a case to the error that is raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {label}")
        raise
