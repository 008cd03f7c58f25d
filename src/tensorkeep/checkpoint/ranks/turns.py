"""The order in which the saves of a process group are written: one after another, the same on all ranks."""

import threading


class Turn:
    """The place of a save among those of its group, whose exchanges would mix if two of them were written at once.

    ``queue`` is the list of the group. `take` is called on all ranks in the same order. The turn ends with `end`, or
    when the save is dropped without being written.
    """

    def __init__(self, queue: list[threading.Event]) -> None:
        self._queue = queue
        self._earlier: list[threading.Event] = []
        self._ended = threading.Event()

    def __del__(self) -> None:
        self._ended.set()

    def take(self) -> None:
        """Queue the save behind those that were begun before it."""
        self._earlier = [each for each in self._queue if not each.is_set()]
        self._queue[:] = [*self._earlier, self._ended]

    def wait(self) -> None:
        """Wait until all earlier saves are over, whether they succeed or fail."""
        for each in self._earlier:
            each.wait()

    def end(self) -> None:
        """Let the next save be written."""
        self._ended.set()
