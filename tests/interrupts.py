"""Raises in a call as a signal handler would, at every instruction where Python may run handlers."""

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_CHECKED = {
    number
    for name, number in dis.opmap.items()
    if name in ("CALL", "CALL_FUNCTION_EX", "RESUME") or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name)
}
"""The instructions after which the interpreter runs signal handlers: calls, and the ends of loops."""


class _Handler:
    """A trace function that raises at one such instruction, in the thread that has set it."""

    def __init__(self, place: int, error: BaseException) -> None:
        self.left = place
        self._error = error
        self._last: dict[FrameType, int] = {}

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if before is not None and frame.f_code.co_code[before] in _CHECKED:
                self.left -= 1
                if self.left < 0:
                    sys.settrace(None)
                    self._last.clear()
                    raise self._error
        return self.trace


def interrupted_at(place: int, call: Callable[[], object], error: BaseException) -> bool:
    """Call a function as if a signal came at a place of its run, and its handler raised ``error``.

    Return False if the run has fewer places. What the function itself raises is raised.

    Examples
    --------
    >>> done = []
    >>> interrupted_at(3, lambda: [done.append(number) for number in range(9)], TimeoutError())
    True
    >>> 0 < len(done) < 9
    True
    """
    handler = _Handler(place, error)
    before = sys.gettrace()
    sys.settrace(handler.trace)
    try:
        call()
    except type(error) as raised:
        if raised is not error:
            raise
    finally:
        sys.settrace(before)
    return handler.left < 0
