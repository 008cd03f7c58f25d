"""Objects that a save replaces by their states: everything with a ``state_dict()``, and random-number generators."""

import random
import sys
from typing import Any, Protocol

import numpy as np

# The lengths of the buffers in which numpy's generators have positions.
MT19937_WORDS = 624
_PHILOX_WORDS = 4


class Stateful(Protocol):
    """What saves and loads ask of an object. It may also have ``check_state_dict``, which raises for a misfit."""

    def state_dict(self) -> Any:
        """Return the state of the object: a nested state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Set the state of the object."""


class _TorchGenerator:
    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"device": self._generator.device.type, "state": self._generator.get_state()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        _check_same("device", self._generator.device.type, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"])


class _NumpyGenerator:
    def __init__(self, bit_generator: Any) -> None:
        self._bit_generator = bit_generator

    def state_dict(self) -> dict[str, Any]:
        return dict(self._bit_generator.state)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        _check_same("bit_generator", type(self._bit_generator).__name__, state)
        # Numpy does not check them, and reads beyond its buffer. The state may come from any file.
        inner = state.get("state")
        check_position("pos", inner.get("pos", 0) if isinstance(inner, dict) else 0, MT19937_WORDS)
        check_position("buffer_pos", state.get("buffer_pos", 0), _PHILOX_WORDS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        self._bit_generator.state = state


class _NumpyRandomState(_NumpyGenerator):
    """The generators before numpy 1.17, which also keep half of the last pair of normal numbers."""

    def __init__(self, generator: Any) -> None:
        super().__init__(generator._bit_generator)
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return dict(self._generator.get_state(legacy=False))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        self._generator.set_state(state)


class PythonGenerator:
    """The state of a `random.Random`, or of the module `random` itself."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with its 625 numbers as one array."""
        version, internal, gauss = self._generator.getstate()
        return {"version": version, "internal": np.array(internal, np.uint32), "gauss": gauss}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the state is of another version of Python's generator, or of another kind."""
        _check_same("version", self._generator.getstate()[0], state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state."""
        self._generator.setstate((state["version"], tuple(map(int, state["internal"])), state["gauss"]))


def check_position(key: str, position: object, most: int) -> None:
    """Raise ValueError if a generator's position in its buffer is outside of the buffer."""
    if not (isinstance(position, int) and 0 <= position <= most):
        raise ValueError(f"a generator with {key} {position!r} was saved, beyond 0 to {most}")


def _check_same(key: str, own: object, state: Any) -> None:
    saved = state.get(key) if isinstance(state, dict) else None
    if saved is None:
        raise ValueError("a random-number generator in the state, none saved")
    if saved != own:
        raise ValueError(f"a generator with {key} {own!r} in the state, {saved!r} saved")


def generator_state(value: object) -> Stateful | None:
    """Access to the state of a generator of torch, numpy or Python; None for any other value."""
    # Without imports: what is not loaded has no instances.
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    if torch is not None and isinstance(value, torch.Generator):
        return _TorchGenerator(value)
    if numpy_random is not None:
        if isinstance(value, numpy_random.Generator):
            return _NumpyGenerator(value.bit_generator)
        if isinstance(value, numpy_random.BitGenerator):
            return _NumpyGenerator(value)
        if isinstance(value, numpy_random.RandomState):
            return _NumpyRandomState(value)
    # The generator of the system has no state.
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return PythonGenerator(value)
    return None


def stateful(value: Any) -> Stateful | None:
    """The value itself if it has a ``state_dict()`` and its reverse, access to a generator's state, or None."""
    # The class of a stateful object has these methods, too.
    if isinstance(value, type):
        return None
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        found: Stateful = value
        return found
    return generator_state(value)
