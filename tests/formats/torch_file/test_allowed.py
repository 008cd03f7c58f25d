"""Classes outside torch's allow list: named in the error, read as dicts if allowed, and never executed."""

import argparse
import collections
import os
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.formats.torch_file.allowed import allowed_names
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

EXECUTED: list[object] = []


class Watched:
    """A class that records whatever of it runs."""

    def __new__(cls, *arguments: object) -> "Watched":
        EXECUTED.append(arguments)
        return super().__new__(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        EXECUTED.append(state)


class Slotted:
    __slots__ = ("a", "b")


class Calls:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    inner = argparse.Namespace(name="adamw")
    args = argparse.Namespace(lr=0.1, opt=inner, same=inner, betas=(0.9, argparse.Namespace(x=[inner])), kind=Watched)
    torch.save(
        {"model": {"w": torch.ones(3)}, "args": args, "best": np.float64(0.5), "ids": np.arange(3)}, tmp_path / "x"
    )
    return tmp_path / "x"


ALLOWED = {
    "model": {"w": torch.ones(3)},
    "args": {
        "lr": 0.1,
        "opt": {"name": "adamw"},
        "same": {"name": "adamw"},
        "betas": (0.9, {"x": [{"name": "adamw"}]}),
        "kind": f"{__name__}.Watched",
    },
    "best": np.float64(0.5),
    "ids": np.arange(3),
}
ALLOW = [argparse.Namespace, "numpy", Watched]


def test_the_error_names_all_classes_and_the_options_that_allow_them(path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedError) as caught:
        tensorkeep.load(path)
    assert "argparse.Namespace, numpy._core.multiarray._reconstruct, " in caught.value.message
    assert str(caught.value.remedy).endswith(f'allow=["argparse.Namespace", "numpy", "{__name__}.Watched"]')
    with pytest.raises(
        tensorkeep.UnsupportedError, match=r"calls argparse.Namespace: .*\n.*allow=\[\"argparse.Namespace\"\]$"
    ):
        tensorkeep.load(path, allow=["numpy", Watched])


def test_every_call_reads_objects_of_allowed_classes_as_dicts(path: Path, tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    assert same(tensorkeep.load(path, allow=ALLOW), ALLOWED)
    assert set(torch.serialization.get_safe_globals()) == before  # torch keeps them in no order
    with tensorkeep.open(path, allow=ALLOW) as opened:
        assert list(opened) == ["model.w", "best", "ids"]
    assert tensorkeep.info(path, allow=ALLOW).total.tensors == 3
    assert tensorkeep.verify(path, allow=ALLOW)
    tensorkeep.convert(path, tmp_path / "native", allow=ALLOW)
    assert same(tensorkeep.load(tmp_path / "native"), ALLOWED)
    assert tensorkeep.diff(path, tmp_path / "native", allow=ALLOW)


def test_every_command_takes_the_classes(path: Path, tmp_path: Path) -> None:
    allow = [word for name in ("argparse.Namespace", "numpy", f"{__name__}.Watched") for word in ("--allow", name)]
    assert main(["info", str(path)]) == 7
    for command in (["info"], ["ls"], ["verify"], ["convert", "--to", "native"], ["diff"]):
        second = [str(tmp_path / "native")] if command[0] in ("convert", "diff") else []
        assert main([command[0], str(path), *second, *command[1:], *allow]) == 0


def test_the_code_of_an_allowed_class_is_not_run(tmp_path: Path) -> None:
    watched, slotted = Watched(), Slotted()
    watched.__dict__.update(a=1)
    slotted.a = 2
    torch.save({"watched": watched, "slotted": slotted, "w": torch.ones(1)}, tmp_path / "x")
    EXECUTED.clear()
    found = tensorkeep.load(tmp_path / "x", allow=[Watched, Slotted])
    assert (found["watched"], found["slotted"]) == ({"a": 1}, {"a": 2})
    assert EXECUTED == []


def test_an_object_made_from_arguments_becomes_its_class_and_arguments(tmp_path: Path) -> None:
    for value, name, arguments in (
        (pathlib.PurePosixPath("/a"), "pathlib.PurePosixPath", ["/", "a"]),
        (Calls(Watched, 1), f"{__name__}.Watched", [1]),
        (Calls(print, 1), "builtins.print", [1]),
    ):
        torch.save({"x": value, "w": torch.ones(1)}, tmp_path / "x")
        EXECUTED.clear()
        found = tensorkeep.load(tmp_path / "x", allow=name)["x"]
        assert (found, EXECUTED) == ({"class": name, "arguments": arguments}, []), name


class Settings(dict[str, Any]):
    pass


class Names(list[str]):
    pass


def test_subclasses_of_dict_and_list_become_containers_of_their_items(tmp_path: Path) -> None:
    settings = Settings(lr=1, names=Names(["a", "b"]), single=Names(["c"]), queue=collections.deque([1, 2], 3))
    settings["inner"] = Settings(x=torch.ones(1))
    settings.attribute = 1  # type: ignore[attr-defined]
    state = {"x": settings, "lists": collections.defaultdict(list, a=[1]), "w": torch.ones(1)}
    torch.save(state, tmp_path / "x")
    allow = [Settings, Names, "collections.deque", "collections.defaultdict", "builtins.list"]
    found = tensorkeep.load(tmp_path / "x", allow=allow)
    inner = {"lr": 1, "names": ["a", "b"], "single": ["c"], "queue": [1, 2], "inner": {"x": torch.ones(1)}}
    assert same(found, {"x": inner, "lists": {"a": [1]}, "w": torch.ones(1)})
    # An object with items whose class is not allowed is named.
    torch.save({"x": Settings(names=Names(["a"])), "w": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(tensorkeep.UnsupportedError, match=f"calls {__name__}.Names: "):
        tensorkeep.load(tmp_path / "x", allow=Settings)


def test_functions_that_run_code_names_of_no_class_and_objects_that_contain_themselves_are_refused(
    tmp_path: Path,
) -> None:
    for name, function in (("builtins.eval", eval), ("posix.system", os.system)):
        torch.save({"x": Calls(function, "EXECUTED.append(1)"), "w": torch.ones(1)}, tmp_path / "x")
        with pytest.raises(tensorkeep.UnsupportedError, match=f"calls {name}: .*\ndo not load it elsewhere"):
            tensorkeep.load(tmp_path / "x")
        with pytest.raises(tensorkeep.UsageError, match=f"{name} cannot be allowed"):
            tensorkeep.load(tmp_path / "x", allow=name)
    for name in ("Namespace", "", "a b.c", "a..b", 5):
        with case(repr(name)), pytest.raises(tensorkeep.UsageError, match="not the full name of a class"):
            allowed_names([name])
    args = argparse.Namespace()
    args.self = args
    torch.save({"args": args, "w": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(tensorkeep.UnsupportedError, match="contain themselves"):
        tensorkeep.load(tmp_path / "x", allow="argparse.Namespace")
