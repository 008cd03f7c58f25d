"""The sections of a run's configuration: each setting with its default and bounds.

Types and bounds are in the annotations (`msgspec.Meta`). `Section` checks them whenever a section is made.
"""

import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from tensorkeep.errors import UsageError
from tensorkeep.structs import prepared

_LARGEST = 1e300
"""Of all numbers that may be large; it excludes infinity."""

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

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)).items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, prepared(kind))
            except msgspec.ValidationError as error:
                raise UsageError(f"{name} is {value!r}", remedy=f"give {describe_type(kind)}") from error


def read_settings(values: Mapping[str, Any], kind: type[S]) -> S:
    """Return the section of a class that nested plain values describe; numbers and flags may be given as text.

    Raises UsageError if a value is missing, unknown, of the wrong type or out of bounds; the message names it, such as
    ``"optim.lr"``.
    """
    try:
        return msgspec.convert(values, prepared(kind), strict=False)
    except msgspec.ValidationError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UsageError):
            cause = cause.__cause__
        if cause is not None:  # from `__post_init__`: msgspec wraps it
            raise UsageError(cause.message, remedy=cause.remedy) from error
        path = str(error).partition(" - at `$.")[2].rstrip("`").split(".")
        value, found = _at(values, kind, path)
        if isinstance(value, Mapping) or found is None:
            raise UsageError(f"the settings are not valid: {error}", remedy="see tensorkeep train --help") from error
        raise UsageError(f"{'.'.join(path)} is {value!r}", remedy=f"give {describe_type(found)}") from error


def _at(values: Any, kind: Any, path: list[str]) -> tuple[Any, Any]:
    """Return the value at a path of names and the type that it must have; None for a path that does not exist."""
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
    """Return in words which values a setting may have, such as ``"a whole number 1 or more, or none"``."""
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


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "none",
}


class DataConfig(Section, frozen=True):
    """The training data.

    Attributes
    ----------
    source : str
        A folder of prepared data, or whatever ``tensorkeep data prepare`` takes.
    tokenizer, vocab_size, validation : str, int, float
        How the source is prepared if it is not prepared data. The vocabulary size is for ``"bpe"`` only; ``validation``
        is the fraction kept for validation.
    field : str
        The field of the lines of ``.jsonl`` files, or the column of tables, that holds the text.
    order : str
        ``"shuffled"``: every window of an epoch once. ``"random"``: windows at random places.
    mask_documents : bool
        Whether tokens attend to those of their own document only, although windows hold parts of several.
    """

    source: str = "stdlib"
    tokenizer: str = "char"
    vocab_size: int | None = None
    validation: Fraction = 0.1
    field: str = "text"
    order: Literal["shuffled", "random"] = "shuffled"
    mask_documents: bool = False


class ParameterGroup(Section, frozen=True):
    """A factor of the learning rate, and a weight decay, instead of those of the other parameters."""

    lr_factor: Positive | None = None
    weight_decay: NonNegative | None = None


class OptimConfig(Section, frozen=True):
    """How weights are updated; see `tensorkeep.train.optim.optimizers`.

    Attributes
    ----------
    name : str
        ``"adamw"``, or ``"muon"`` for the matrices of the blocks and AdamW for the rest.
    lr : float
        The peak learning rate of AdamW.
    muon_lr, muon_momentum : float
        The peak learning rate and the momentum of Muon.
    muon_steps : int
        Newton-Schulz steps of each update: fewer are faster and less exact.
    muon_polynomials : str
        ``"quintic"``, the same in each step, or ``"polar-express"``, the best one for each (see `POLAR_EXPRESS`), of
        which four are about as good as five of the former.
    muon_beta2 : float
        Of the mean squares by which Muon divides the rows of an update (NorMuon, arXiv 2510.05491); 0 for none.
    muon_split : bool
        Whether Muon orthogonalises queries, keys and values each by itself, not their fused projection.
    weight_decay : float
        Of matrices. Vectors (biases, norms) do not decay.
    beta1, beta2, eps : float
        AdamW's.
    clip : float
        The largest norm of the gradient, which is scaled down to it; 0 for no limit.
    implementation : str
        Which of torch's AdamW: ``"default"``, ``"foreach"`` or ``"fused"``.
    groups : dict of str to ParameterGroup
        Settings of ``"embeddings"``, ``"head"``, ``"norms"``, ``"biases"`` or ``"matrices"``, or of names that match a
        pattern such as ``"blocks.0.*"``. Where several match, the last one that states a setting decides.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-3
    muon_lr: Positive = 0.02
    muon_momentum: Decay = 0.95
    muon_steps: Annotated[int, Meta(ge=1, le=99)] = 5  # torch allows no more
    muon_polynomials: Literal["quintic", "polar-express"] = "quintic"
    muon_beta2: Decay = 0.0
    muon_split: bool = False
    weight_decay: NonNegative = 0.1
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    clip: NonNegative = 1.0
    implementation: Literal["default", "foreach", "fused"] = "default"
    groups: dict[str, ParameterGroup] = {}  # msgspec copies it for each instance


class ScheduleConfig(Section, frozen=True):
    """How the learning rate changes; see `tensorkeep.train.optim.schedules`.

    Attributes
    ----------
    name : str
        ``"cosine"``, ``"linear"``, ``"wsd"`` (warm-up, stable, decay), ``"constant"``, ``"plateau"``, or ``"range"``: a
        range test, which rises from ``final`` to the peak, ends early when the loss diverges, and suggests a tenth of
        the rate at which the smoothed loss was lowest.
    start : int
        The step after which the schedule begins: it covers the steps from there to ``loop.steps``, warm-up included.
    warmup_steps : int
        Steps in which the rate rises from 0.
    final : float
        The rate of the last step as a fraction of the peak; for ``"range"``, that of the first step. 0 is reached one
        step after the last one, so that the last step still changes the weights.
    decay : float
        For ``"wsd"``: the fraction of the steps in which the rate decays.
    patience, factor : int, float
        For ``"plateau"``: after this many evaluations without a better loss, the rate is multiplied by the factor.
    """

    name: Literal["cosine", "linear", "wsd", "constant", "plateau", "range"] = "cosine"
    start: Steps = 0
    warmup_steps: Steps = 0
    final: Annotated[float, Meta(ge=0, le=1)] = 0.1
    decay: Annotated[float, Meta(gt=0, le=1)] = 0.2
    patience: Count = 3
    factor: Fraction = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "range" and not self.final:
            raise UsageError("schedule.final is 0", remedy="a range test begins above 0: give 0.001, for example")
        if self.name == "range" and self.warmup_steps:
            raise UsageError(
                f"schedule.warmup_steps is {self.warmup_steps}, and a range test has no warm-up",
                remedy="give schedule.warmup_steps 0",
            )


class LoopConfig(Section, frozen=True):
    """How long to train, where, and how much at a time.

    Attributes
    ----------
    steps : int
        Updates of the weights.
    batch_size : int
        Sequences in a batch, on all ranks together.
    accumulate : int
        Batches whose gradients make one step.
    fill_memory : bool
        Whether a new run on a GPU chooses ``batch_size`` itself, as large as memory allows, and ``accumulate`` with
        it, so that a step has the same sequences. A resumed run keeps the choice.
    seed : int
        Of the initial weights, the order of the data, and the global generators of torch (dropout), numpy and Python.
    device, threads : str, int, optional
        ``"auto"`` is the GPU if there is one, else the CPU; the CPU threads of torch, by default its own choice.
    on_divergence : str
        At a loss or gradient that is not finite: ``"stop"``, or ``"skip"`` the update.
    """

    steps: Count = 1000
    batch_size: Count = 12
    accumulate: Count = 1
    fill_memory: bool = False
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1337
    device: str = "auto"
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    on_divergence: Literal["stop", "skip"] = "stop"


class EvalConfig(Section, frozen=True):
    """When and on what the validation loss is measured.

    Attributes
    ----------
    every : int
        Steps from one evaluation to the next; 0 for one at the end only.
    tokens : int, optional
        Of the validation split, in windows that are spread evenly over it, the same each time; none for all of it.
    batches : int, optional
        The former of ``tokens``, which it overrides: batches of up to 16,384 tokens.
    patience : int, optional
        Stop early after this many evaluations without a better loss.
    """

    every: Steps = 250
    tokens: Count | None = 2**20
    batches: Count | None = None
    patience: Count | None = None


class SampleConfig(Section, frozen=True):
    """Text that is generated while training.

    Attributes
    ----------
    every : int
        Steps from one sample to the next; 0 for none.
    prompt : str, optional
        By default a new document, or a new line.
    tokens, temperature, top_k
        See `tensorkeep.train.generate.generate`.
    """

    every: Steps = 0
    prompt: str | None = None
    tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    temperature: NonNegative = 0.8
    top_k: Count | None = None


class CheckpointConfig(Section, frozen=True):
    """When and how the run is saved; see `tensorkeep.CheckpointManager`.

    The last step is always saved, and so is every step with a new best validation loss, unless ``keep_best`` is 0.
    If ``store`` is the URL of a run in an object store, the steps are uploaded to it as well.
    """

    every: Steps = 250
    keep_last: Count = 2
    keep_best: Steps = 1
    compression: str | None = None
    incremental: bool | Literal["delta"] = True
    asynchronous: bool = True
    memory_budget: int | str | None = None
    settings: str | None = None
    store: str | None = None


class AverageConfig(Section, frozen=True):
    """An exponential moving average of the weights, which is evaluated and saved beside them; ``decay=0`` for none."""

    decay: Decay = 0.0


class LogConfig(Section, frozen=True):
    """How often a line is written to ``log.jsonl``, what it contains, and where its figures are sent as well.

    Attributes
    ----------
    every : int
        Steps from one line about training to the next.
    gradient_norms, tensorboard : bool
        Whether these lines have the gradient's norm in each block or layer; whether TensorBoard files are written.
    wandb, mlflow : str, optional
        The project of Weights & Biases, and the experiment of MLflow, that the figures are sent to.
    """

    every: Count = 10
    gradient_norms: bool = False
    tensorboard: bool = False
    wandb: str | None = None
    mlflow: str | None = None
