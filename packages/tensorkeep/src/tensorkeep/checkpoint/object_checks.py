"""Asking an object whether it accepts its saved state, before anything is loaded."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorkeep.checkpoint.stateful import StatefulObject, items, made, paths_to, with_items
from tensorkeep.errors import PathLike, TensorkeepError, UnsupportedLeafError
from tensorkeep.formats.base import Entry
from tensorkeep.state.leaf import LeafKind, allocate
from tensorkeep.state.modules import unwrapped
from tensorkeep.state.names import Key, KeyPath, display

if TYPE_CHECKING:
    import torch

# What ``load_state_dict`` and ``check_state_dict`` raise about a state that does not fit.
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OverflowError)

# In the states of torch's own optimizers; other optimizers may factor (Adafactor) or project (GaLore) theirs.
_SHAPED_LIKE_THE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("momentum_buffer", "ax", "prev", "step_size", "variance"),
)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Stands for a tensor of a checkpoint in its state."""

    name: str
    kind: LeafKind
    entry: Entry


@dataclass(slots=True)
class MatchedObject:
    """An object, its saved state, and the names of its selected and of its existing tensors."""

    stateful: StatefulObject
    saved: Any
    wanted: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)


def is_module(value: object) -> bool:
    """Whether an object is a torch module: its tensors exist and are filled in place."""
    # Without an import: if torch is not loaded, nothing can be a module.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def in_own_names(stateful: StatefulObject, saved: Any) -> Any:
    """A saved state with the names of the module that it is for; the reverse of `named_as_saved`."""
    if not stateful.names:
        return saved
    taken = {*stateful.names.values()}
    found = OrderedDict((own, saved[key]) for own, key in stateful.names.items() if key in saved)
    found.update((key, item) for key, item in saved.items() if key not in taken)
    versions, own_versions = (getattr(each, "_metadata", None) for each in (saved, stateful.state))
    if versions is not None and own_versions is not None and versions.keys() != own_versions.keys():
        # The versions by module. The innermost of several keys is the module inside its wrappers.
        by_name = {unwrapped(key): version for key, version in sorted(versions.items(), key=lambda item: len(item[0]))}
        versions = {key: by_name[unwrapped(key)] for key in own_versions if unwrapped(key) in by_name}
    # Modules read their version from it, and convert older states.
    if versions is not None:
        vars(found)["_metadata"] = versions
    return found


def is_extra_state(keys: KeyPath, path: KeyPath) -> bool:
    """Whether keys lead to the result of a module's ``get_extra_state``, which may have any shape."""
    key = keys[len(path)] if len(keys) > len(path) else None
    return isinstance(key, str) and (key == "_extra_state" or key.endswith("._extra_state"))


class ModuleAnswer(NamedTuple):
    """What a module does with a saved state, by the keys of the state."""

    unchanged: set[Key]  # tensors that it takes as they are; it makes others from the rest
    missing: set[Key]
    unexpected: set[Key]  # and ignored
    different: dict[Key, str]  # tensors that it makes in another dtype


def converts_states(module: "torch.nn.Module") -> bool:
    """Whether a module may change a state that it loads, even if all names are its own. Modules of torch do not."""
    import torch

    plain = torch.nn.Module
    return type(module).load_state_dict is not plain.load_state_dict or any(
        each._load_state_dict_pre_hooks
        or not type(each)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for each in module.modules()
    )


def ask_module(
    stateful: StatefulObject, saved: Mapping[Key, Any], others: Collection[Key], misfits: Collection[Key]
) -> ModuleAnswer | None:
    """Ask an unchanged module what it does with a state without data; None if it cannot answer."""
    # Modules convert states that their older versions have saved. So a copy of the module on the meta device loads
    # tensors without data.
    # A hook that holds the module, as a closure does, sets tensors of the module instead of the copy's.
    own = [values for each in stateful.value.modules() for values in (each._parameters, each._buffers)]
    before = [dict(values) for values in own]
    try:
        answer = _answer(stateful, saved, others)
        # Tensors of other shapes may be all that it refuses.
        if answer is None and misfits:
            answer = _answer(stateful, saved, {*others, *misfits})
            if answer is not None:
                answer.missing.update(misfits)
                answer.unexpected.update(misfits)
        return answer
    finally:
        for values, kept in zip(own, before, strict=True):
            values.clear()
            values.update(kept)


def _answer(stateful: StatefulObject, saved: Mapping[Key, Any], without: Collection[Key]) -> ModuleAnswer | None:
    offered = with_items(saved, {key: item for key, item in saved.items() if key not in without})
    # A module may define load_state_dict() with fewer arguments, or without the result of torch's.
    # `assign` keeps the very tensors that are given, so that unchanged ones are recognised.
    for options in ({"strict": False, "assign": True}, {"strict": False}, {}):
        try:
            twin = _without_memory(stateful.value)
            own = twin.state_dict(keep_vars=True) if "assign" in options else {}
            before = {key: _form(tensor) for key, tensor in own.items()}  # some modules resize their tensors
            given = _for_twin(own, in_own_names(stateful, offered))
            keys = twin.load_state_dict(given, **options)
            after = twin.state_dict(keep_vars=True) if "assign" in options else {}
        except TypeError:
            continue
        except Exception:  # of any hook, also because it needs the data; or the module cannot be copied
            return None
        if options and not hasattr(keys, "missing_keys"):
            continue
        unchanged, different = set[Key](), dict[Key, str]()
        for key, (shape, dtype) in before.items():
            made = _form(after.get(key))
            if after.get(key) is given.get(key, own) and made[0] == shape:
                unchanged.add(stateful.names.get(key, key))
            elif made[1] not in (dtype, None):
                text = f"{dtype} in the state, {made[1]} made from the saved one"
                different[stateful.names.get(key, key)] = text.replace("torch.", "")
        missing, extra = (keys.missing_keys, keys.unexpected_keys) if options else ((), ())
        lacks, ignores = ({stateful.names.get(key, key) for key in found} for found in (missing, extra))
        return ModuleAnswer(unchanged, lacks, ignores, different)
    return None


def _form(value: Any) -> tuple[Any, Any]:
    return getattr(value, "shape", None), getattr(value, "dtype", None)


def _for_twin(own: Mapping[str, Any], saved: Any) -> dict[str, Any]:
    """A saved state without data. With ``assign=True``, a module then has these very tensors."""
    import torch

    found: dict[str, Any] = OrderedDict(_without_data(saved))
    for key, tensor in found.items():
        if isinstance(own.get(key), torch.nn.Parameter) and type(tensor) is torch.Tensor:
            found[key] = torch.nn.Parameter(tensor, requires_grad=False)
    if (versions := getattr(saved, "_metadata", None)) is not None:
        vars(found)["_metadata"] = copy.deepcopy(versions)  # load_state_dict writes into it
    return found


def _without_memory(module: "torch.nn.Module") -> "torch.nn.Module":
    import torch

    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    # Tensors that are plain attributes are shared with the copy.
    others = {id(v): v for each in module.modules() for v in vars(each).values() if isinstance(v, torch.Tensor)}
    memo: dict[int, Any] = others
    for key, tensor in tensors.items():
        meta = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[key] = meta
        if isinstance(tensor, torch.nn.Parameter):
            memo[key] = torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
    # Deep, with the tensors replaced: no memory is allocated or copied.
    return copy.deepcopy(module, memo)


def has_check(value: object) -> bool:
    """``check_state_dict()`` decides which shapes an object accepts."""
    return callable(getattr(value, "check_state_dict", None))


def check_fillable(state: Any, checkpoint: PathLike) -> None:
    """Raises UnsupportedLeafError for a tensor without memory: of a lazy module, or on the meta device."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for path, tensor in paths_to(state, torch.Tensor):
        if torch.nn.parameter.is_lazy(tensor):
            what, options, remedy = "a lazy parameter", "", "run the module once on data"
        elif tensor.is_meta:
            what, options, remedy = "a tensor on the meta device", ", assign=True", "make the module on another device"
        else:
            continue
        raise UnsupportedLeafError(
            f"{what} has no memory to load into; nothing was touched",
            path=checkpoint,
            name=display(path),
            remedy=f"{remedy}, or load without `into` and use module.load_state_dict(loaded{options})",
        )


def refusals(value: Any, saved: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield what an object would refuse of its saved state: the keys in it, and the reason in words."""
    torch = sys.modules.get("torch")
    if has_check(value):
        try:
            value.check_state_dict(made(_without_data(saved)))
        except TensorkeepError as error:
            yield (), error.message
        except REFUSALS as error:
            yield (), str(error) or type(error).__name__
    elif torch is not None and isinstance(value, torch.optim.Optimizer):
        yield from _by_optimizer(value, saved)


def _without_data(saved: Any) -> Any:
    """A state with meta tensors, or arrays of stride 0, for its tensors."""
    if isinstance(saved, SavedTensor):
        dtype, shape = saved.entry.dtype, saved.entry.shape
        if saved.kind in ("tensor", "parameter") or not isinstance(dtype.numpy, np.dtype):
            return allocate("tensor", dtype, shape, device="meta")
        return np.broadcast_to(np.zeros((), dtype.numpy), shape)
    found = items(saved)
    return saved if found is None else with_items(saved, {key: _without_data(item) for key, item in found})


def _by_optimizer(optimizer: "torch.optim.Optimizer", saved: Any) -> Iterator[tuple[KeyPath, str]]:
    groups = optimizer.param_groups
    counts, saved_counts = _counts(groups), _counts(saved.get("param_groups") if isinstance(saved, dict) else None)
    if saved_counts is None:
        yield (), "an optimizer in the state, none saved"
        return
    if counts != saved_counts:
        yield (), f"groups of {counts} parameters in the state, of {saved_counts} saved"
        return
    yield from _renamed_parameters(groups, saved["param_groups"])
    # Optimizers of others may have states of any shape.
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return
    states = saved.get("state")
    for index, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
        found = states.get(index) if isinstance(states, dict) else None
        state, shape = found if isinstance(found, dict) else {}, tuple(parameter.shape)
        for key in _SHAPED_LIKE_THE_PARAMETER:
            value = state.get(key)
            if isinstance(value, SavedTensor) and value.entry.shape != shape:
                yield ("state", index, key), f"{list(value.entry.shape)} saved, for a parameter of {list(shape)}"


def _renamed_parameters(groups: Any, saved: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield, group by group, the first parameter with another name than the saved one, if both have names."""
    for index, pair in enumerate(zip(groups, saved, strict=True)):
        names = [group.get("param_names") if isinstance(group, dict) else None for group in pair]
        if all(isinstance(found, list | tuple) for found in names):
            # Optimizers match parameters by position: a parameter would take the momentum of another one.
            for number, (own, theirs) in enumerate(zip(*names, strict=False)):
                if unwrapped(str(own)) != unwrapped(str(theirs)):
                    text = (
                        f"parameter {number} is {own!r} in the state, {theirs!r} saved; use the saved order and names"
                    )
                    yield ("param_groups", index, "param_names", number), text
                    break


def _counts(groups: Any) -> list[int] | None:
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, LookupError):
        return None
