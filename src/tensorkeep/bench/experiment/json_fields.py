"""Taking the fields of a JSON object one by one, so that a slip of the pen is told by its name and never passed over.

Objects are read as JSON with ``//`` comments, which people write into configuration files and examples show.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from tensorkeep.errors import UsageError

MAX_FILE_BYTES = 1 << 20
"""More than any experiment that a person wrote."""

# A text, closed or not, or a comment. Outside of texts, JSON has no slash. Possessive, so that time stays linear.
_TEXT_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*+"?|//[^\n]*', re.DOTALL)
_SHOWN = 40


class _Required:
    """No default: the field must be there."""


REQUIRED: Any = _Required()


class Fields:
    """The fields of one JSON object, each taken with the type and the range that it must have.

    Parameters
    ----------
    value : object
        What was found in the file.
    where : str
        What it is, for messages: ``"arm 'x'"``.
    path : str or None
        The file.
    known : collection of str
        The keys that it may have.

    Raises
    ------
    UsageError
        If the value is no object, or has another key.
    """

    def __init__(self, value: object, where: str, path: str | None, known: Collection[str]) -> None:
        self.where = where
        self.path = path
        if not isinstance(value, dict):
            self.refuse(f"must be an object, not {shown(value)}", remedy=f"its keys: {', '.join(known)}")
        self.value: dict[str, Any] = value
        for key in value:
            if key not in known:
                self.refuse(f"has no key {shown(key)}", remedy=did_you_mean(key, known, "its keys"))

    def refuse(self, problem: str, *, remedy: str) -> NoReturn:
        """Raise UsageError about this object."""
        raise UsageError(f"{self.where} {problem}", path=self.path, remedy=remedy)

    def text(self, key: str, default: Any = REQUIRED, *, example: str) -> Any:
        """Return a text that is not empty."""
        return self._take(key, default, "a text", example, lambda value: isinstance(value, str) and bool(value.strip()))

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Return true or false."""
        return self._take(key, default, "true or false", "true", lambda value: isinstance(value, bool))

    def whole(self, key: str, default: Any = REQUIRED, *, least: int = 1, most: int, example: int) -> Any:
        """Return a whole number within a range."""

        def fits(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

        return self._take(key, default, f"a whole number from {least} to {most}", str(example), fits)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, empty if it is not there."""

        def fits(value: object) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) and item for item in value)

        return tuple(self._take(key, [], "a list of texts", '["one", "two"]', fits))

    def object(self, key: str, default: Any = REQUIRED, *, example: str) -> Any:
        """Return an object as it stands."""
        return self._take(key, default, "an object", example, lambda value: isinstance(value, dict))

    def list(self, key: str, default: Any = REQUIRED, *, example: str) -> Any:
        """Return a list as it stands; a required one must not be empty."""
        return self._take(
            key,
            default,
            "a list" if default is not REQUIRED else "a list that is not empty",
            example,
            lambda value: isinstance(value, list) and (bool(value) or default is not REQUIRED),
        )

    def _take(self, key: str, default: Any, kind: str, example: str, fits: Any) -> Any:
        if key not in self.value and default is not REQUIRED:
            return default
        remedy = f"write, for example, {json.dumps(key)}: {example}"
        if key not in self.value:
            self.refuse(f"lacks {json.dumps(key)}, {kind}", remedy=remedy)
        value = self.value[key]
        if value is None and default is None:
            return None
        if not fits(value):
            orelse = " or null" if default is None else ""
            self.refuse(f"has {json.dumps(key)}: {shown(value)}; it must be {kind}{orelse}", remedy=remedy)
        return value


def did_you_mean(name: str, known: Collection[str], what: str) -> str:
    """Return the remedy for a name that there is not: the nearest one, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{what}: {', '.join(known)}"


def shown(value: object) -> str:
    """Return a value as JSON has it, cut short if it is long."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def read_json(path: Path) -> object:
    """Return what a file of JSON holds; ``//`` comments outside of texts are passed over.

    Raises
    ------
    UsageError
        If it cannot be read, is too large, is no JSON, or gives a key twice.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        remedy = "give the name of an experiment, or the path of a JSON file"
        raise UsageError(f"cannot read the experiment: {error.strerror}", path=path, remedy=remedy) from error
    if len(content) > MAX_FILE_BYTES:
        remedy = "give the configuration, not results"
        raise UsageError(f"is larger than {MAX_FILE_BYTES:,} bytes: no experiment", path=path, remedy=remedy)
    try:
        text = _TEXT_OR_COMMENT.sub(_blank, content.decode("utf-8-sig"))
        value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
        # What cannot be written again, half a character or a number beyond floats, could not be kept in results either.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"is not JSON: {reason}", path=path, remedy="correct the file") from error


def _blank(found: re.Match[str]) -> str:
    """Replace a comment by as many spaces, so that the places in messages stay right."""
    return " " * len(found[0]) if found[0].startswith("//") else found[0]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} stands twice in one object")
        found[key] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
