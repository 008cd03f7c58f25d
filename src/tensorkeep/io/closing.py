"""Base class of context managers that call `close()`."""

from typing import Self


class Closing:
    """A context manager that calls its `close`."""

    def close(self) -> None:
        """Release what it holds; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
