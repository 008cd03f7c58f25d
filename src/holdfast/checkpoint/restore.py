"""Putting a whole training state back: tensors in place, objects by their ``load_state_dict``, all checked first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.arguments import budget_pool
from holdfast.checkpoint.filling import structure_of
from holdfast.checkpoint.finding import open_reader
from holdfast.checkpoint.into import compare
from holdfast.checkpoint.load import load, load_open
from holdfast.checkpoint.stateful import at, expand, find_stateful, put_back
from holdfast.formats.base import OpenSettings, Reader
from holdfast.io.buffers import DEFAULT_BUDGET
from holdfast.io.parallel import Progress
from holdfast.state import names
from holdfast.state.tree import GivenLeaf, given_leaves, given_paths, leaf_specs, unflatten

if TYPE_CHECKING:
    import torch


def restore_state(
    path: Path,
    *,
    into: Any,
    device: torch.device | str | None,
    threads: int | None,
    progress: Progress | None,
) -> Any:
    """Load a checkpoint, into tensors and objects if they are given; see `CheckpointManager.restore`."""
    if into is None:
        return load(path, device=device, threads=threads, progress=progress)
    with (
        budget_pool(DEFAULT_BUDGET) as pool,
        open_reader(path, OpenSettings(pool=pool), "native") as reader,
    ):
        plain = expand(into)
        fit = _Fit(reader, into, plain)
        if fit.differences:
            raise fit.differences.error(reader.path)
        loaded = load_open(reader, pool, into=plain, new=fit.new, device=device, progress=progress, threads=threads)
    return put_back(into, loaded)


class _Saved:
    """Stands for a tensor of a checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Fit:
    """Whether a state fits a checkpoint, and which tensors of objects cannot be filled in place.

    A module's tensors, and those that were given as they are, must be there exactly. Other objects may still be empty,
    as a new optimizer is, and take what was saved.

    Attributes
    ----------
    differences : Differences
    new : set of str
        Names of the tensors that are loaded into new memory.
    """

    def __init__(self, reader: Reader, into: Any, plain: Any) -> None:
        self._reader = reader
        self._given: Mapping[str, GivenLeaf] = given_leaves(plain)
        self._paths = given_paths(plain)
        with structure_of(reader.path):
            markers: dict[str, Any] = {name: _Saved(name) for name in reader.entries}
            self._saved = unflatten(reader.flat.skeleton, markers, as_given=True, path=reader.path)
        missing: list[str] = []
        different: dict[str, str] = {}
        self.new: set[str] = set()
        for path, value in find_stateful(into):
            try:
                different |= self._look_at(path, value, at(self._saved, path))
            except KeyError:
                missing.append(names.display(path))
        kept = [name for name in reader.entries if name not in self.new]
        there = {name: leaf for name, leaf in self._given.items() if name in self._paths}
        self.differences = compare(there, reader, leaf_specs(reader.flat.skeleton), kept, partial=False)
        self.differences.missing = missing + [name for name in self.differences.missing if not _below(name, missing)]
        self.differences.different |= different

    def _look_at(self, path: names.Path, value: Any, saved: Any) -> dict[str, str]:
        """Find out which tensors of an object are loaded into new memory; return what of it differs, in words."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            return {}
        wanted = {marker.name for marker in _markers(saved)}
        there = {name for name, keys in self._paths.items() if keys[: len(path)] == path}
        if wanted != there or not all(map(self._fits, wanted)):
            self.new |= wanted
            for name in there:
                del self._paths[name]
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            return dict(_optimizer_differences(value, saved, self._reader, path))
        return {}

    def _fits(self, name: str) -> bool:
        leaf, entry = self._given[name].leaf, self._reader.entries[name]
        return (leaf.dtype, leaf.shape) == (entry.dtype, entry.shape) and leaf.writable


def _below(name: str, objects: list[str]) -> bool:
    return any(name.startswith(f"{place}.") for place in objects)


def _markers(saved: Any) -> Iterator[_Saved]:
    if isinstance(saved, _Saved):
        yield saved
    elif isinstance(saved, dict):
        for value in saved.values():
            yield from _markers(value)
    elif isinstance(saved, list | tuple):
        for value in saved:
            yield from _markers(value)


def _optimizer_differences(
    optimizer: torch.optim.Optimizer, saved: Any, reader: Reader, path: names.Path
) -> Iterator[tuple[str, str]]:
    """Yield what of an optimizer's saved state belongs to other parameters, and how it differs, in words."""
    where = names.display(path)
    counts = [len(group["params"]) for group in optimizer.param_groups]
    groups = saved.get("param_groups", []) if isinstance(saved, dict) else []
    saved_counts = [len(group["params"]) for group in groups]
    if counts != saved_counts:
        yield where, f"groups of {counts} parameters in the state, of {saved_counts} saved"
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for value in saved.get("state", {}).get(index, {}).values():
            if not isinstance(value, _Saved):
                continue
            shape = reader.entries[value.name].shape
            if len(shape) == parameter.ndim > 0 and shape != tuple(parameter.shape):
                yield value.name, f"{list(shape)} saved, for a parameter of {list(parameter.shape)}"
