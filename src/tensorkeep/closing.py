"""Base class of context managers that call `close()`."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that calls its `close`."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
