"""Dotted names of leaves, the part that each leaf belongs to, and selection by glob."""

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from fnmatch import fnmatchcase

from tensorkeep.errors import UsageError

Scalar = str | int | float | None
# A key of a dict, a field, or an index of a list (``bool`` is an int).
Key = Scalar | tuple[Scalar, ...]

KeyPath = tuple[Key, ...]

# The name of the tensor if it is the whole state.
BARE_NAME = "tensor"

DEFAULT_PART = "model"
_RESERVED = "__metadata__"
_LONGEST_STEM = 100
_LONG_INTEGER = 2**64


def key_text(key: Key) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, tuple):
        return f"({', '.join(ascii(part) if isinstance(part, str) else key_text(part) for part in key)})"
    # Python refuses to format very long integers in decimal.
    return hex(key) if isinstance(key, int) and abs(key) >= _LONG_INTEGER else repr(key)


def display(path: KeyPath) -> str:
    """A path for an error message, printable for all keys."""
    text = ".".join(map(key_text, path)) or "(the whole state)"
    return text.encode("utf-8", "backslashreplace").decode()


def assign_names(paths: Sequence[KeyPath]) -> list[str]:
    """Return a unique name for each path of keys: ``model.w``, or ``model.a%2Eb`` where ``model.a.b`` is taken."""
    if list(paths) == [()]:
        return [BARE_NAME]
    # Keys are joined by dots, so that a plain ``state_dict`` keeps the names that other tools expect. A path is escaped
    # only if its name is ambiguous (``{"a": {"b": t}, "a.b": u}``, ``{1: t, "1": u}``) or reserved, or a key is empty:
    # within a key ``.``, ``%`` and NUL become ``%2E``, ``%25`` and ``%00``; an empty key becomes ``%``; keys that are
    # not strings become ``%i1``, ``%True``, ``%None``, ``%r1%2E5``, ``%r(1, 'a')``. Names are never parsed back,
    # because the skeleton has the keys. They depend only on the set of paths, not on its order. No name has a NUL, is
    # empty or `__metadata__`. Names that share their first key are unique without it, too.
    escaped = {index for index, path in enumerate(paths) if not _is_natural(path)}
    while True:
        names = [_join(path, index in escaped) for index, path in enumerate(paths)]
        # Names of one part must also be unique without the first key, as they are in the files of the part.
        rests = [
            (_distinct(path[0]), _join(path[1:], index in escaped)) if len(path) > 1 else ((), index)
            for index, path in enumerate(paths)
        ]
        clashing = _repeated(names) | _repeated(rests)
        # Escaped names are unique among themselves, so this ends at the latest when all are.
        if clashing <= escaped:
            return names
        escaped |= clashing


def assign_parts(paths: Sequence[KeyPath], names: Sequence[str], *, is_dict: bool) -> dict[str, tuple[str, str]]:
    """Return each leaf's part and its name relative to the part."""
    # Each container at the top is a part; tensors at the top form the part `model`, or `top` if that is a container.
    if not is_dict:
        return {name: (DEFAULT_PART, name) for name in names}
    keys = {_distinct(path[0]): path[0] for path in paths if len(path) > 1}
    titles = dict(zip(keys, assign_names([(key,) for key in keys.values()]), strict=True))
    loose = DEFAULT_PART if DEFAULT_PART not in titles.values() else "top"
    while loose in titles.values():
        loose += "_"
    parts = {}
    for path, name in zip(paths, names, strict=True):
        if len(path) == 1:
            parts[name] = (loose, name)
        else:
            # The same form, escaped or natural, as in the full name.
            parts[name] = (titles[_distinct(path[0])], _join(path[1:], name != _join(path, False)))
    return parts


def part_file_stem(part: str) -> str:
    """A safe file name, without suffix, for one part; at most 100 bytes."""
    # Percent-encoded, so that no part can name a file outside of the checkpoint's folder.
    kept = re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), part)
    # A part must not look like a numbered file of another part, nor like the manifest.
    stem = re.sub(r"-(\d+)-of-(\d+)$", r"%2D\1%2Dof%2D\2", kept) or "%"
    if stem.lower() == "manifest":
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    return stem if len(stem) <= _LONGEST_STEM else _marked(stem, part)


def part_file_stems(parts: Iterable[str]) -> dict[str, str]:
    """Unique even on file systems that ignore case."""
    stems = {part: part_file_stem(part) for part in parts}
    counts = Counter(stem.lower() for stem in stems.values())
    return {part: stem if counts[stem.lower()] == 1 else _marked(stem, part) for part, stem in stems.items()}


def select(names: Iterable[str], patterns: str | Iterable[str]) -> list[str]:
    """Return the names that match, in their order; ``*`` matches dots. UsageError if a pattern matches nothing."""
    candidates = list(names)
    known = set(candidates)
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        # First as an exact name: brackets in ``a[0].w`` are not a glob.
        matching = {pattern} & known
        if not matching:
            matching |= {name for name in candidates if fnmatchcase(name, pattern)}
        if not matching:
            raise UsageError(f"no tensor matches {pattern!r}", remedy=nearest(candidates, pattern))
        chosen |= matching
    return [name for name in candidates if name in chosen]


def nearest(names: list[str], pattern: str) -> str:
    """The remedy for a name that matches no tensor: names that are like it."""
    if not names:
        return "the checkpoint has no tensors"
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean {pattern + '.*'!r}?"
    near = difflib.get_close_matches(pattern, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"its names look like {names[0]!r}"


def _is_natural(path: KeyPath) -> bool:
    texts = [key_text(key) for key in path]
    reserved = texts[0] == _RESERVED if len(texts) == 1 else texts[1:] == [_RESERVED]
    return not reserved and all(text and "\0" not in text for text in texts)


def _join(path: KeyPath, escaped: bool) -> str:
    return ".".join(map(_escape if escaped else key_text, path))


def _escape(key: Key) -> str:
    if isinstance(key, str):
        text = key.replace("%", "%25").replace(".", "%2E").replace("\0", "%00")
        return "%5F_metadata__" if text == _RESERVED else text or "%"
    if isinstance(key, bool) or key is None:
        return f"%{key}"
    if isinstance(key, int):
        return f"%i{key_text(key)}"
    return "%r" + key_text(key).replace("%", "%25").replace(".", "%2E")


def _distinct(key: Key) -> tuple[type, str]:
    """Differs for ``1``, ``"1"``, ``1.0`` and ``True``, which are equal or print alike."""
    return type(key), key_text(key)


def _repeated(items: Sequence[Hashable]) -> set[int]:
    counts = Counter(items)
    return {index for index, item in enumerate(items) if counts[item] > 1}


def _marked(stem: str, part: str) -> str:
    digest = hashlib.blake2b(part.encode(), digest_size=8).hexdigest()
    return f"{stem[: _LONGEST_STEM - 17].rstrip('%')}-{digest}"
