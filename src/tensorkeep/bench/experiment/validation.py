"""Conversion of JSON to typed structs; an error names file, field and remedy."""

import re
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import DictType, ListType, StructType, Type, UnionType, VarTupleType, type_info

from tensorkeep.errors import UsageError, did_you_mean
from tensorkeep.structs import prepared

T = TypeVar("T")

_PLACE = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`")


def convert(value: object, kind: type[T], *, what: str, path: str | None = None) -> T:
    """Return the value of a JSON file as an instance of a struct type; messages call it ``what``.

    Raises UsageError if the value does not have that type. The message names the place of the error and the field.

    Examples
    --------
    >>> class Point(msgspec.Struct):
    ...     x: int
    >>> convert({"x": 3}, Point, what="the point")
    Point(x=3)
    """
    try:
        return msgspec.convert(value, prepared(kind))
    except msgspec.ValidationError as error:
        message, remedy = _explain(str(error), value, kind, what)
        raise UsageError(message, path=path, remedy=remedy) from error


def _explain(problem: str, value: object, kind: type[Any], what: str) -> tuple[str, str]:
    """Return message and remedy for an error of msgspec."""
    found = _PLACE.fullmatch(problem)
    problem, place = (found[1], found[2]) if found else (problem, "")
    fields, place = _follow(place, value, kind)
    where = ": ".join(part for part in (what, place) if part)
    field = _FIELD.fullmatch(problem)
    if field is None:
        return f"{where}: {problem[:1].lower()}{problem[1:]}", "correct the value"
    if "unknown" in problem:
        return f"{where} has no field {field[1]!r}", did_you_mean(field[1], fields, "its fields")
    return f"{where} lacks the field {field[1]!r}", f"add {field[1]!r}"


def _follow(place: str, value: Any, kind: type[Any]) -> tuple[list[str], str]:
    """Follow a path through a struct type and a value.

    Return the fields of the struct at its end, and the path with the ``name`` of each object of a list on it:
    ``arms[0] ('one').settings``.
    """
    info: Type | None = type_info(kind)

    def described(step: re.Match[str]) -> str:
        nonlocal info, value
        key: Any = step[1] or int(step[2])
        info = _child(info, key)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            value = None
        name = value.get("name") if step[2] and isinstance(value, dict) else None
        return f"{step[0]} ({name!r})" if isinstance(name, str) else step[0]

    place = _STEP.sub(described, place).removeprefix(".")
    end = _container(info)
    return ([field.encode_name for field in end.fields] if isinstance(end, StructType) else []), place


def _container(info: Type | None) -> Type | None:
    """Return the type of objects or lists among those that a value may have."""
    kinds = info.types if isinstance(info, UnionType) else (info,)
    return next((kind for kind in kinds if isinstance(kind, StructType | ListType | VarTupleType | DictType)), None)


def _child(info: Type | None, key: str | int) -> Type | None:
    info = _container(info)
    if isinstance(info, StructType):
        return next((field.type for field in info.fields if field.encode_name == key), None)
    if isinstance(info, ListType | VarTupleType):
        return info.item_type
    return info.value_type if isinstance(info, DictType) else None
