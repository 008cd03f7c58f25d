"""Loading into DTensors: each rank reads its own boxes, and the ranks together load all of a checkpoint."""

import os
from collections.abc import Collection, Mapping
from typing import Any

from tensorkeep.checkpoint.ranks.group import Ranks
from tensorkeep.checkpoint.stateful import StatefulObject, is_below
from tensorkeep.errors import RanksDisagreeError
from tensorkeep.formats.base import Entry, Reader
from tensorkeep.state.names import Path, display
from tensorkeep.state.sharded import ShardedLeaf, is_dtensor


def check_same_checkpoint(reader: Reader, ranks: Ranks) -> None:
    """Raise RanksDisagreeError unless all ranks have opened the same checkpoint, or copies of it."""
    found = ranks.caller.exchange([reader.identity(), os.fsencode(reader.path)], "opening the checkpoint")
    paths = [os.fsdecode(path) for _, path in found]
    for rank, (identity, _) in enumerate(found):
        if identity != found[0][0]:
            raise RanksDisagreeError(
                f"rank 0 has opened {paths[0]}, and rank {rank} has opened another checkpoint, {paths[rank]}",
                remedy="give the same path on all ranks; if it is the same, a save has replaced it: load it again",
            )


def loaded_by_others(
    ranks: Ranks, tensors: Mapping[str, Path], extra: Collection[Path], per_rank: Collection[Path]
) -> tuple[set[str], list[Path]]:
    """Return the names of saved tensors that this rank leaves to others, and the extra keys that remain.

    ``tensors`` are those that it lacks, with their keys. What no rank has is extra, as with one process. Below
    ``per_rank`` there are the values of other ranks.
    """
    keys = {display(path): path for path in extra}
    received = ranks.caller.exchange([list(tensors), list(keys)], "comparing its state with the checkpoint")
    lacking = [set.intersection(*map(set, each)) for each in zip(*received, strict=True)]
    places = {*per_rank}
    elsewhere = {name for name, path in tensors.items() if name not in lacking[0] or is_below(path, places)}
    return elsewhere, [path for text, path in keys.items() if text in lacking[1] and not is_below(path, places)]


def optimizer_state_like_parameters(
    objects: Mapping[Path, StatefulObject], entries: Mapping[str, Entry], paths: Mapping[str, Path]
) -> dict[str, tuple[ShardedLeaf, Any]]:
    """Return memory for the saved tensors of optimizers whose parameters are DTensors, each divided as its parameter.

    A new optimizer has no state yet whose memory could be filled. ``paths`` are the keys that lead to each saved
    tensor. The result has the leaf and the DTensor by name.
    """
    import torch

    found: dict[str, tuple[ShardedLeaf, Any]] = {}
    for path, stateful in objects.items():
        if not isinstance(stateful.value, torch.optim.Optimizer):
            continue
        parameters = [parameter for group in stateful.value.param_groups for parameter in group["params"]]
        for name, keys in paths.items():
            if len(keys) != len(path) + 3 or keys[: len(path)] != path or keys[len(path)] != "state":
                continue
            number = keys[len(path) + 1]
            if not isinstance(number, int) or number >= len(parameters):
                continue
            parameter = parameters[number]
            if not is_dtensor(parameter) or tuple(parameter.shape) != entries[name].shape:
                continue
            tensor = torch.empty_like(parameter, dtype=entries[name].dtype.torch, requires_grad=False)
            leaf = ShardedLeaf.of(name, tensor)
            assert leaf is not None
            found[name] = leaf, tensor
    return found
