"""How techniques observe a step: hooks, wrappers of the run's operations, a warm-up, and the proof of an AdamW update.

Nothing here changes the bits that the step computes. Hooks ignore forward passes without gradients (evaluations).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from chatgot.model.gpt import IGNORED
from chatgot.techniques.base import StepState, Technique

Observer = Callable[[nn.Module, Tensor], object]
Operation = Literal["loss", "backward", "clip", "accepts", "update"]
Loss = Callable[[Tensor, Tensor], Tensor]
OptimizerState = Mapping[str, Any]

# Tokens of a batch that are also computed in plain Python while a step is observed; at least one row.
PROVED_TOKENS = 1024

# Elements of every weight that the proof of an update compares, evenly spaced.
_SAMPLED = 4096
# The largest distance of an update from the formula, relative to the length of the update.
_TOLERANCE = 0.01
# The relative rounding error of a float32 weight after an update; smaller differences are not errors.
_ROUNDING = 4 * torch.finfo(torch.float32).eps


@contextmanager
def count_calls(modules: Iterable[nn.Module]) -> Iterator[Counter[nn.Module]]:
    calls: Counter[nn.Module] = Counter()
    with observe_inputs(modules, lambda module, inputs: calls.update([module])):
        yield calls


def observe_inputs(modules: Iterable[nn.Module], observer: Observer) -> AbstractContextManager[None]:
    """Call a function with the first input of every module, before other hooks change it."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # An evaluation within the step must not count.
        if torch.is_grad_enabled():
            observer(module, inputs[0])

    return hooked(each.register_forward_pre_hook(hook, prepend=True) for each in modules)


def observe_outputs(modules: Iterable[nn.Module], observer: Observer) -> AbstractContextManager[None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            observer(module, output)

    return hooked(each.register_forward_hook(hook) for each in modules)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    with ExitStack() as hooks:
        for handle in handles:
            hooks.callback(handle.remove)
        yield


@contextmanager
def replace_operation(run: StepState, name: Operation, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(run.operations, name)
    setattr(run.operations, name, replacement)
    try:
        yield
    finally:
        setattr(run.operations, name, original)


def observe_operation(
    run: StepState,
    name: Operation,
    *,
    before: Callable[..., object] | None = None,
    after: Callable[[], object] | None = None,
) -> AbstractContextManager[None]:
    """Call functions before and after one of a run's `Operations`; ``before`` gets its arguments."""
    operation = getattr(run.operations, name)

    def observed(*arguments: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = operation(*arguments)
        if after is not None:
            after()
        return result

    return replace_operation(run, name, observed)


@contextmanager
def record_inputs(run: StepState) -> Iterator[list[Tensor]]:
    recorded: list[Tensor] = []
    with observe_operation(run, "loss", before=lambda inputs, targets: recorded.append(inputs.cpu())):
        yield recorded


def fingerprint(tensor: Tensor) -> int:
    """Return the sum of the bits of a float32 tensor, read as integers."""
    # Bits, not values: -0.0 equals 0.0, and NaN does not equal itself. A sum of integers has no order.
    return int(tensor.view(torch.int32).sum(dtype=torch.int64))


@dataclass
class Updates:
    """The number of weight updates (0 if the gradient was not finite), and the steps of every optimizer by name."""

    count: int = 0
    optimizer_steps: Counter[str] = field(default_factory=Counter)


@contextmanager
def count_updates(run: StepState) -> Iterator[Updates]:
    updates = Updates()

    def count() -> None:
        updates.count += 1

    def count_step(name: str, *arguments: Any) -> None:
        updates.optimizer_steps[name] += 1

    # An optimizer may be stepped without the run's `update`, so both are counted.
    handles = (each.register_step_pre_hook(partial(count_step, name)) for name, each in run.optimizers.items())
    with hooked(handles), observe_operation(run, "update", before=count):
        yield updates


# Warm-up. Compiled code and captured graphs run no Python hooks, and most techniques observe a step by hooks. So a
# technique that compiles or captures does it in a warm-up, before hooks are installed; and while the first step is
# observed, a few rows of every batch are also computed in plain Python for the hooks of the other techniques. Only a
# few rows: plain Python may need memory for a whole batch that compiled code does not need.


@contextmanager
def next_batch(run: StepState) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the inputs and targets of the next step's first batch, on the device; restore the run and random states."""
    position = run.batches.state_dict()
    # Techniques choose batches by step, and this batch belongs to the next step.
    run.progress.step += 1
    run.is_last_batch = run.config.loop.gradient_accumulation_steps == 1
    try:
        inputs, targets = next(run.batches)
        with _restored_random_states(run):
            yield inputs.to(run.device), targets.to(run.device)
    finally:
        run.batches.load_state_dict(position)
        run.progress.step -= 1


def warm_up_loss(run: StepState) -> None:
    with next_batch(run) as (inputs, targets):
        parameters = [each for each in run.model.parameters() if each.requires_grad]
        # Not backward(): it would leave gradients for the step to add to.
        torch.autograd.grad(run.operations.loss(inputs, targets), parameters, allow_unused=True)


@contextmanager
def plain_rows_computed(run: StepState) -> Iterator[None]:
    """Within this context, also compute a few rows of every batch in plain Python, if the loss itself runs no hooks."""
    loss, plain = run.operations.loss, run.operations.plain_loss
    if plain is None:
        yield
        return
    # Copied before observers add hooks: these are the tables that the code was compiled with.
    tables = [each for module in run.model.modules() for each in (module._forward_pre_hooks, module._forward_hooks)]
    hooks = [(each, dict(each)) for each in tables]

    def with_plain_rows(inputs: Tensor, targets: Tensor) -> Tensor:
        # Here the hooks of observers run; the loss below runs without them.
        _compute_and_discard(run, plain, *few_rows(inputs, targets))
        with _without_function_modes(), _replaced(hooks):
            return loss(inputs, targets)

    with replace_operation(run, "loss", with_plain_rows):
        yield


def few_rows(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return some rows of a batch: `PROVED_TOKENS`, or one row."""
    rows = max(1, PROVED_TOKENS // inputs.shape[1])
    # Rows without targets come last: their mean loss is NaN.
    chosen = (targets != IGNORED).any(1).int().argsort(descending=True, stable=True)[:rows]
    return inputs[chosen], targets[chosen]


def _compute_and_discard(run: StepState, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Run a forward and a backward pass without a change of gradients or random states."""
    # Differentiate with respect to the input of the blocks. The backward pass then goes through all blocks and computes
    # no weight gradients, which would need memory beside the gradients of the step. A weight is not always part of the
    # graph: FSDP computes with other tensors.
    into: list[Tensor] = []

    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        into.append(given[0].detach().requires_grad_())
        return (into[0], *given[1:])

    with _restored_random_states(run), hooked([run.model.blocks[0].register_forward_pre_hook(hook, prepend=True)]):
        value = loss(inputs, targets)
        if isinstance(run.model, FSDPModule):
            # Without this, FSDP would exchange the gradients of earlier micro-batches, and sum them in another order
            # than an unobserved step. The loss of the batch itself sets it again.
            run.model.set_requires_gradient_sync(False)
        torch.autograd.grad(value, into)
        if isinstance(run.model, FSDPModule):
            run.model.set_requires_gradient_sync(True)


@contextmanager
def _replaced(hooks: Sequence[tuple[dict[int, Any], dict[int, Any]]]) -> Iterator[None]:
    """Suspend the hooks of observers: a module with hooks of its own, such as a sharded one, would be recompiled."""
    observed = [dict(each) for each, _ in hooks]
    _set_hooks(hooks)
    try:
        yield
    finally:
        _set_hooks([(each, before) for (each, _), before in zip(hooks, observed, strict=True)])


def _set_hooks(hooks: Sequence[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    for each, wanted in hooks:
        if each.keys() != wanted.keys():
            each.clear()
            each.update(wanted)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Suspend function modes that observe torch: code that was compiled without a mode would be recompiled."""
    with ExitStack() as modes:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            modes.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _restored_random_states(run: StepState) -> Iterator[None]:
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        yield


# The proof of an update. A call of a kernel, or a quantised state, does not show that the weights moved as they should:
# an optimizer that moves them half as far would pass. The losses of a few steps do not show it either, because they
# change by less than the tolerance of most techniques. So AdamW's formula is computed again, in float64.


@dataclass
class AdamWUpdate:
    updates: int = 0
    # Weights that had a gradient.
    compared: int = 0
    # The largest relative distance of an update from the formula.
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def check(self, technique: Technique) -> None:
        if self.wrong:
            raise technique.not_active(
                f"{len(self.wrong)} of {self.compared} weights were not updated as AdamW would; the update of "
                f"{self.wrong[0]} is {self.largest:.0%} off",
                "report it, with the versions of torch and torchao, and the device",
            )


@contextmanager
def observe_adamw(run: StepState, state_of: Callable[[Tensor], OptimizerState] | None = None) -> Iterator[AdamWUpdate]:
    """Compare the update of AdamW within this context with the formula of Loshchilov and Hutter, arXiv 1711.05101.

    ``state_of`` returns the state of a weight before the update; by default the state in the run's optimizer.
    """
    found, update = AdamWUpdate(), run.operations.update
    names = {id(weight): name for name, weight in run.model.named_parameters()}

    def observed_update() -> None:
        optimizer = run.optimizers["adamw"]
        states = state_of or (lambda weight: optimizer.state.get(weight, {}))
        # Taken before the update, which overwrites weights and states in place.
        samples = {
            names.get(id(weight), "a weight"): (weight, *_before_and_expected(weight, states(weight), group))
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        }
        update()
        found.updates += 1
        found.compared += len(samples)
        errors = {name: _error(*sample) for name, sample in samples.items()}
        found.wrong = sorted((name for name in errors if errors[name] > _TOLERANCE), key=lambda name: -errors[name])
        found.largest = max(errors.values(), default=0.0)

    with replace_operation(run, "update", observed_update):
        yield found


@torch.no_grad()
def _before_and_expected(weight: Tensor, state: OptimizerState, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    before, gradient = _elements(weight), _elements(weight.grad)
    beta1, beta2 = group["betas"]
    step = float(state.get("step", 0)) + 1
    # Before the first step an optimizer has no states.
    momentum, variance = (
        _elements(state[key]) if key in state else torch.zeros_like(gradient) for key in ("exp_avg", "exp_avg_sq")
    )
    momentum = torch.lerp(momentum, gradient, 1 - beta1) / (1 - beta1**step)
    variance = torch.lerp(variance, gradient.square(), 1 - beta2) / (1 - beta2**step)
    direction = momentum / (variance.sqrt() + group["eps"])
    return before, before * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction


def _error(weight: Tensor, before: Tensor, expected: Tensor) -> float:
    """Return the distance of the weight from its expected value, relative to the update; 0 within rounding."""
    # A weight in float32 cannot be nearer to the formula than its own rounding.
    distance = (_elements(weight) - expected).abs() - _ROUNDING * before.abs()
    # A missed distance of 0 is right even if the update is 0; NaN is an error.
    missed, length = distance.clamp(min=0).norm(), (expected - before).norm()
    return 0.0 if bool(missed == 0) else float((missed / length).nan_to_num(float("inf"), float("inf")))


def _elements(tensor: Any) -> Tensor:
    """Return evenly spaced elements of this process's part of a tensor, in float64 on the CPU."""
    # Each process compares its own shards, without communication.
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if is_traceable_wrapper_subclass(local):
        # A quantised state of torchao.
        local = local.dequantize()  # type: ignore[attr-defined]
    flat: Tensor = local.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].to("cpu", torch.float64, copy=True)
