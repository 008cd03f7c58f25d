"""Tables of settings that are checked when they are made; a flag wins over environment, TOML file and default."""

import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta

from tensorkeep.errors import UsageError
from tensorkeep.ext import prepared

# What the names of environment variables begin with.
PREFIX = "TENSORKEEP_"
# The largest value of a number without another bound; it excludes infinity.
_LARGEST = 1e300
Count = Annotated[int, Meta(ge=1)]
Steps = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=_LARGEST)]
NonNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
S = TypeVar("S", bound="Section")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings: immutable, with a type, bounds and a default for each.

    Raises UsageError if a value is of the wrong type or out of bounds.
    """

    # Words of other programs for settings of this table. Errors about them suggest the setting.
    aliases: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        # msgspec checks what it decodes, but not the arguments of a constructor.
        for name, kind in _field_types(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, np.generic):
                # A number of numpy becomes one of Python, which JSON can store.
                value = value.item()
                msgspec.structs.force_setattr(self, name, value)
            try:
                msgspec.convert(value, prepared(kind))
            except msgspec.ValidationError as error:
                raise UsageError(f"{name} is {value!r}", remedy=f"give {describe_type(kind)}") from error


def read_settings(values: Mapping[str, Any], kind: type[S]) -> S:
    """Numbers and flags may be given as text. Raises UsageError, which names the value, such as ``"optim.lr"``."""
    try:
        return msgspec.convert(values, prepared(kind), strict=False)
    except msgspec.ValidationError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UsageError):
            cause = cause.__cause__
        if cause is not None:  # from `__post_init__`: msgspec wraps it
            raise UsageError(cause.message, remedy=cause.remedy) from error
        # msgspec names the place in its message only.
        path = str(error).partition(" - at `$.")[2].rstrip("`").split(".")
        value, found = _at(values, kind, path)
        # Where the value is a table, the error is about a name in the table, which only the text of msgspec says.
        if isinstance(value, Mapping) or found is None:
            raise UsageError(f"the settings are not valid: {error}", remedy="see tensorkeep train --help") from error
        raise UsageError(f"{'.'.join(path)} is {value!r}", remedy=f"give {describe_type(found)}") from error


def _at(values: Any, kind: Any, path: list[str]) -> tuple[Any, Any]:
    """The value at a path of names and the type that it must have; None for a path that does not exist."""
    for name in path:
        fields = _field_types(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}
        if name not in fields or name not in values:
            return None, None
        values, kind = values[name], fields[name]
    return values, kind


@cache
def _field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def describe_type(kind: Any) -> str:
    """In words which values a setting may have, such as ``"a whole number 1 or more, or none"``."""
    if get_origin(kind) is Annotated:
        base, meta = get_args(kind)
        bounds = [
            f"{meta.ge} or more" if meta.ge is not None else "",
            f"above {meta.gt}" if meta.gt is not None else "",
            f"{meta.le} or less" if meta.le not in (None, _LARGEST) else "",
            f"below {meta.lt}" if meta.lt is not None else "",
        ]
        finite = "a finite number" if meta.le == _LARGEST else _WORDS[base]
        return f"{finite} {' and '.join(filter(None, bounds))}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"several values, each {describe_type(get_args(kind)[0])}"
    if get_origin(kind) in (Union, types.UnionType):
        return ", or ".join(map(describe_type, get_args(kind)))
    return _WORDS.get(kind, str(kind))


def choices(kind: Any) -> list[str]:
    """Return the texts that a setting of this type may be, where it has a list of them."""
    if get_origin(kind) is Literal:
        return [each for each in get_args(kind) if isinstance(each, str)]
    return [choice for each in get_args(kind) for choice in choices(each)]


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "none",
}


def environment_variable_of(name: str) -> str:
    return f"{PREFIX}{name.replace('.', '_').upper()}"


def merged(
    names: Iterable[str],
    *,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Mapping[str, object],
) -> dict[str, object]:
    """Return the settings that the user gave, by dotted name: a flag overrides the environment, which overrides a file.

    The environment variable of ``"optim.lr"`` is ``TENSORKEEP_OPTIM_LR``.
    """
    variables = {name: environment_variable_of(name) for name in names}
    given = {name: environment[variable] for name, variable in variables.items() if variable in environment}
    # The later one wins: a flag, then the environment, then the file.
    return {**file, **given, **flags}
