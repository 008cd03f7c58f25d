"""Conversion of JSON to typed structs; an error names file, field and remedy."""

import re
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import DictType, ListType, StructType, Type, UnionType, VarTupleType, type_info

from tensorkeep.errors import UsageError, did_you_mean

T = TypeVar("T")

_PLACE = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`")


def convert(value: object, kind: type[T], *, what: str, path: str | None = None) -> T:
    """Return a JSON value as an instance of a struct type.

    Parameters
    ----------
    value : object
        What the JSON holds: dicts, lists, strings, numbers, booleans, None.
    kind : type
        A `msgspec.Struct`.
    what : str
        What the value is, for messages: ``"the experiment"``.
    path : str, optional
        The file that the value comes from.

    Raises UsageError if the value does not have that type. The message names the place of the error and the field.

    Examples
    --------
    >>> class Point(msgspec.Struct):
    ...     x: int
    >>> convert({"x": 3}, Point, what="the point")
    Point(x=3)
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, remedy = _explain(str(error), value, kind, what)
        raise UsageError(message, path=path, remedy=remedy) from error


def _explain(problem: str, value: object, kind: type[Any], what: str) -> tuple[str, str]:
    """Return message and remedy for an error of msgspec."""
    found = _PLACE.fullmatch(problem)
    problem, place = (found[1], found[2]) if found else (problem, "")
    fields, names = _fields_at(place, value, kind)
    where = ": ".join(part for part in (what, _described(place, names)) if part)
    field = _FIELD.fullmatch(problem)
    if field is None:
        return f"{where}: {problem[:1].lower()}{problem[1:]}", "correct the value"
    if "unknown" in problem:
        return f"{where} has no field {field[1]!r}", did_you_mean(field[1], fields, "its fields")
    return f"{where} lacks the field {field[1]!r}", f"add {field[1]!r}"


def _fields_at(place: str, value: object, kind: type[Any]) -> tuple[list[str], dict[int, str]]:
    """Follow a path through a struct type and a value.

    Returns
    -------
    list of str
        The fields of the struct at the end of the path.
    dict of int to str
        The ``name`` of the object at each index of a list on the path, by the place of the index in the path.
    """
    info: Type | None = type_info(kind)
    names: dict[int, str] = {}
    for step in _STEP.finditer(place):
        key: Any = step[1] or int(step[2])
        info = _child(info, key)
        try:
            value = value[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            value = None
        if step[2] and isinstance(value, dict) and isinstance(value.get("name"), str):
            names[step.end()] = value["name"]
    struct = _struct(info)
    return ([field.encode_name for field in struct.fields] if struct else []), names


def _struct(info: Type | None) -> StructType | None:
    candidates = info.types if isinstance(info, UnionType) else (info,)
    return next((each for each in candidates if isinstance(each, StructType)), None)


def _child(info: Type | None, key: str | int) -> Type | None:
    if isinstance(info, UnionType):
        info = next((each for each in info.types if isinstance(each, StructType | ListType | VarTupleType)), None)
    if isinstance(info, StructType):
        return next((field.type for field in info.fields if field.encode_name == key), None)
    if isinstance(info, ListType | VarTupleType):
        return info.item_type
    return info.value_type if isinstance(info, DictType) else None


def _described(place: str, names: dict[int, str]) -> str:
    """Return a path with the names of the objects on it: ``arms[0] ('one').settings``."""
    for end in sorted(names, reverse=True):
        place = f"{place[:end]} ({names[end]!r}){place[end:]}"
    return place.removeprefix(".")
