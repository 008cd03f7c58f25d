"""Classes outside torch's allow list: named in the error, read as dicts if allowed, and never executed."""

import argparse
import collections
import copy
import io
import operator
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.formats.torch_file.unpickle import allowed_names
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
    assert (main(["info", str(path)]), main(["convert", str(path), str(tmp_path / "native")])) == (0, 7)
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
    with pytest.warns(UserWarning, match="attributes of tensors or containers are not loaded: attribute"):
        found = tensorkeep.load(tmp_path / "x", allow=allow)
    inner = {"lr": 1, "names": ["a", "b"], "single": ["c"], "queue": [1, 2], "inner": {"x": torch.ones(1)}}
    assert same(found, {"x": inner, "lists": {"a": [1]}, "w": torch.ones(1)})
    # An object with items whose class is not allowed is named.
    torch.save({"x": Settings(names=Names(["a"])), "w": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(tensorkeep.UnsupportedError, match=f"calls {__name__}.Names: "):
        tensorkeep.load(tmp_path / "x", allow=Settings)


def test_functions_that_run_code_and_names_of_no_class_are_refused(tmp_path: Path) -> None:
    for name, function in (("builtins.eval", eval), ("posix.system", os.system)):
        torch.save({"x": Calls(function, "EXECUTED.append(1)"), "w": torch.ones(1)}, tmp_path / "x")
        with pytest.raises(tensorkeep.UnsupportedError, match=f"calls {name}: .*\ndo not load it elsewhere"):
            tensorkeep.load(tmp_path / "x")
        with pytest.raises(tensorkeep.UsageError, match=f"{name} cannot be allowed"):
            tensorkeep.load(tmp_path / "x", allow=name)
    for name in ("Namespace", "", "a b.c", "a..b", 5):
        with case(repr(name)), pytest.raises(tensorkeep.UsageError, match="not the full name of a class"):
            allowed_names([name])


Plain = type("Plain", (torch.Tensor,), {"__module__": __name__})
Wrapper = type("Wrapper", (torch.Tensor,), {"__module__": __name__, "__torch_dispatch__": classmethod(len)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:Sparse CSR", "ignore:TypedStorage")
@pytest.mark.parametrize("zipped", [True, False])
def test_what_cannot_be_read_is_a_placeholder_that_blocks_nothing_else(tmp_path: Path, zipped: bool) -> None:
    path, native = tmp_path / "x", tmp_path / "native"
    cyclic, tagged = argparse.Namespace(lr=0.1), torch.ones(3)
    cyclic.me, cyclic.pair, tagged.tag = cyclic, (cyclic, 1), 1  # type: ignore[attr-defined]
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))  # type: ignore[attr-defined]
    wrapper.codes = torch.ones(2)
    values = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.empty(2, device="meta"), torch.strided]
    values += [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), torch.ones(2).untyped_storage()]
    model = {"w": torch.arange(3.0), "t": tagged, "plain": torch.ones(2).as_subclass(Plain), "wrapper": wrapper}
    state = {"model": model, "values": [*values, Calls(getattr, Watched, "_step")], "args": cyclic}
    state |= {"callbacks": {Watched: {"best": torch.zeros(2)}, (1, "a"): 2}, "file": io.BytesIO(b"x")}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    callbacks = {f"{__name__}.Watched": {"best": torch.zeros(2)}, (1, "a"): 2}
    unread = {f"values.{number}" for number in range(7)}
    model, weight = {"w": torch.arange(3.0), "t": torch.ones(3)}, torch.zeros(3)
    assert tensorkeep.info(path).placeholders.keys() == unread | {"model.plain", "model.wrapper", "args", "file"}
    tensorkeep.convert(path, native, select="*")
    readable = {"model": model, "values": [None] * 7, "callbacks": callbacks}
    assert same(tensorkeep.load(path, select="*"), readable) and same(tensorkeep.load(native), readable)
    with pytest.warns(UserWarning, match="cannot be read: .*sparse"), pytest.warns(tensorkeep.StateMismatchWarning):
        tensorkeep.load(path, into={"model": {"w": weight}}, strict=False)
    assert same(weight, model["w"])
    for use in (tensorkeep.open(path).__getitem__, lambda name: tensorkeep.load(path, select=["model.w", name])):
        with pytest.raises(tensorkeep.UnsupportedError, match=r"'values\.0': cannot be read: a sparse tensor"):
            use("values.0")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pytorch_model.bin").symlink_to(path)
    assert tensorkeep.info(tmp_path / "model").details["attributes_left_out"] == ["tag"]
    assert {*tensorkeep.verify(path).placeholders} == unread | {"model.plain", "model.wrapper", "args", "file"}
    with pytest.raises(tensorkeep.UnsupportedError, match=r"its pickle calls .*\nto read all else, select=.*; .*allow"):
        tensorkeep.load(path)
    allow = [argparse.Namespace, Plain, Wrapper, Watched, "_io.BytesIO"]
    with pytest.warns(UserWarning, match="take the place of"), pytest.warns(UserWarning, match="not loaded: tag"):
        found = tensorkeep.load(path, allow=allow)
    assert {type(each) for each in found["values"]} == {tensorkeep.Placeholder}
    assert (found["args"]["lr"], found["args"]["me"].what) == (0.1, "a reference to args, which contains it")
    assert same([found["model"]["plain"], found["model"]["wrapper"]["codes"]], [torch.ones(2), torch.ones(2)])
    report = tensorkeep.diff(path, path, allow=allow)
    assert (report.equal, bool(tensorkeep.diff(path, path, select="*"))) == (False, True)
    assert {*report.placeholders} == unread | {"args.me", "args.pair.0"}
    with pytest.raises(tensorkeep.UnsupportedError, match=r"'values\.0': cannot be read: a sparse tensor"):
        tensorkeep.convert(path, tmp_path / "other", allow=allow)
    torch.save({"scaler": {"x": torch.eye(2).to_sparse()}, "w": torch.ones(3)}, path)
    with pytest.raises(tensorkeep.UnsupportedError, match=r"'scaler\.x': cannot be read: a sparse tensor"):
        tensorkeep.load(path, into={"scaler": torch.amp.GradScaler("cpu"), "w": weight})
    assert same(weight, model["w"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_protocol_of_pickle_is_read_and_no_key_is_lost(tmp_path: Path, zipped: bool, protocol: int) -> None:
    name = f"{__name__}.Watched"
    keys = [b"a", b"b", (1, (2, 3)), (1, (2, 4)), Watched, name, "\udc80", "\\udc80", torch.float32, (1, "a"), None]
    plain = {"set": {1, 2}, "frozen": frozenset([(1, "a")]), "b": b"x", "array": bytearray(b"x"), "w": torch.ones(2)}
    arrays = [np.arange(6).reshape(2, 3).T, np.float32(1), np.array([True]), np.zeros((0, 2))]
    state = {"keys": {key: place for place, key in enumerate(keys)}, "sets": [{b"a", b"b"}, {(1, (2, 3))}]}
    settings: Any = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    torch.save({**state, "plain": plain, "np": arrays}, tmp_path / "x", **settings)
    with pytest.warns(UserWarning, match="a set of other than plain values"):
        found = tensorkeep.load(tmp_path / "x", allow=["numpy", Watched])
    assert same([found["plain"], found["np"]], [plain, arrays])
    texts = ["b'a'", "b'b'", "(1, (2, 3))", "(1, (2, 4))", f"{name} 2", name, "\\udc80 3", "\\udc80", "torch.float32"]
    assert same(found["keys"], {key: place for place, key in enumerate([*texts, (1, "a"), None])})
    assert [type(each) for each in found["sets"]] == [tensorkeep.Placeholder] * 2


def test_tensor_of_another_device_saved_as_an_array_is_read(tmp_path: Path) -> None:
    array = Calls(torch._utils._rebuild_device_tensor_from_numpy, np.arange(3.0), torch.float64, "cpu", False)
    torch.save({"xla": array, "w": torch.ones(2)}, tmp_path / "x.pt")
    state = tensorkeep.load(tmp_path / "x.pt", allow="numpy")
    assert same(state, {"xla": torch.arange(3.0, dtype=torch.float64), "w": torch.ones(2)})


def test_using_a_placeholder_raises_and_looking_at_it_does_not() -> None:
    placeholder = tensorkeep.Placeholder("a.b", "a sparse tensor", "save x.to_dense()")
    for copied in (copy.deepcopy(placeholder), pickle.loads(pickle.dumps(placeholder))):
        assert str(copied) == repr(placeholder) == "<Placeholder 'a.b': a sparse tensor>"
    operations: list[Any] = [len, iter, next, bool, int, float, complex, bytes, abs, round, torch.as_tensor, np.asarray]
    operations += [operator.call, operator.index, operator.neg, lambda x: 1 + x, lambda x: x.shape, lambda x: x.to(1)]
    names = ("getitem", "contains", "eq", "ne", "lt", "add", "matmul", "iadd", "pow", "and_", "mod", "delitem")
    operations += [lambda x, name=name: getattr(operator, name)(x, 1) for name in names]
    for operation in (*operations, lambda x: tensorkeep.save({"a": x}, "nowhere")):
        with case(operation), pytest.raises(tensorkeep.UnsupportedError, match="a sparse tensor"):
            operation(placeholder)
