"""Names of the tensors of modules and optimizers: without wrappers, and by parameters instead of numbers."""

import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorkeep.state.names import KeyPath, display

if TYPE_CHECKING:
    import torch

# The attributes in which DataParallel, DistributedDataParallel and torch.compile hold the module that they wrap.
WRAPPERS = ("module", "_orig_mod")


def unwrapped(name: str) -> str:
    """A name without the attributes of wrappers. A module of the user may have an attribute of the same name."""
    return ".".join(key for key in name.split(".") if key not in WRAPPERS)


def without_wrappers(module: "torch.nn.Module", state: Any) -> Any:
    """Return what ``module.state_dict()`` returned under the names that the module has without its wrappers."""
    prefixes = _wrapper_prefixes(module)
    if not prefixes or not isinstance(state, dict):
        return state
    names = names_without_wrappers(module, state)
    renamed = OrderedDict((names[key], value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        # The versions by module: of a wrapper and its module, which get one name, the module comes last.
        own = {_strip(f"{key}.", prefixes).removesuffix("."): version for key, version in versions.items()}
        vars(renamed)["_metadata"] = OrderedDict(own)
    return renamed


def names_without_wrappers(module: "torch.nn.Module", keys: Collection[Any]) -> dict[Any, Any]:
    """The names that keys of ``module.state_dict()`` have without its wrappers, by key."""
    prefixes = _wrapper_prefixes(module)
    names = {key: _strip(key, prefixes) if isinstance(key, str) else key for key in keys}
    # A state_dict() of the user may have left the prefixes out, and have such names of its own.
    return names if len({*names.values()}) == len(names) else {key: key for key in keys}


def parameter_names(optimizer: "torch.optim.Optimizer", modules: Mapping[KeyPath, "torch.nn.Module"]) -> Sequence[str]:
    """The names of an optimizer's parameters, by their numbers in its state; none if a parameter is in no module.

    They are names within the module, or begin with the key of the module if the parameters are of several modules.
    """
    found: dict[int, tuple[KeyPath, str]] = {}
    for path, module in modules.items():
        prefixes = _wrapper_prefixes(module)
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (path, _strip(name, prefixes)))
    parameters = dict.fromkeys(id(each) for group in optimizer.param_groups for each in group["params"])
    if not parameters.keys() <= found.keys():
        return ()
    named = [found[each] for each in parameters]
    is_one_module = len({path for path, _ in named}) == 1
    names = [name if is_one_module else f"{display(path)}.{name}" for path, name in named]
    # ``b.weight`` of the module ``a`` and ``weight`` of the module ``a.b``.
    return names if len({*names}) == len(names) else ()


def _wrapper_prefixes(module: "torch.nn.Module") -> list[str]:
    """Prefixes of names such as ``layers.0._orig_mod.``, the longest first."""
    import torch

    wrappers: list[tuple[type, str]] = [
        (torch.nn.DataParallel, "module"),
        (torch.nn.parallel.DistributedDataParallel, "module"),
    ]
    # Without the compiler nothing is compiled, and its import takes seconds.
    if (compiler := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        wrappers.append((compiler.OptimizedModule, "_orig_mod"))
    found = [
        f"{name}.{attribute}." if name else f"{attribute}."
        for name, each in module.named_modules(remove_duplicate=False)
        for kind, attribute in wrappers
        if isinstance(each, kind)
    ]
    return sorted(found, key=len, reverse=True)


def _strip(name: str, prefixes: Sequence[str]) -> str:
    # From the inside to the outside: a shorter prefix stays valid when a longer one has lost its end.
    for prefix in prefixes:
        if name.startswith(prefix):
            kept = prefix[:-1].rpartition(".")[0]
            name = f"{kept}.{name[len(prefix) :]}" if kept else name[len(prefix) :]
    return name
