"""The configuration of a training run: frozen, validated, changed by dotted setting names."""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from chatgot.model.config import ModelConfig
from chatgot.optim.optimizers import OptimConfig, ParameterGroup
from chatgot.optim.schedules import ScheduleConfig
from chatgot.settings import (
    PREFIX,
    Count,
    Decay,
    Fraction,
    NonNegative,
    Section,
    Steps,
    choices,
    environment_variable_of,
    merged,
    read_settings,
)
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.ext import Registry
from tensorkeep.ext.checkpoint import options as settings_file

# Prefix of the settings of groups of parameters, such as ``"optim.groups.embeddings.lr_factor"``.
GROUPS = "optim.groups."
# Prefix of the settings of techniques, such as ``"techniques.compile.mode"``.
TECHNIQUES = "techniques."
# The setting with the techniques that a recipe turns on where they can run.
DEFAULTS = "default_techniques"
# Settings by their earlier names, which flags, environment, files and stored runs may still have.
RENAMED = {
    "loop.accumulate": "loop.gradient_accumulation_steps",
    "loop.fill_memory": "loop.auto_batch_size",
    "optim.clip": "optim.grad_clip",
}

# Techniques that split batches themselves, or choose among the windows of one: they need a given batch size.
_CHOOSE_FROM_BATCHES = ("gradient-accumulation", "pipeline-parallel", "loss-curriculum")


class DataConfig(Section, frozen=True):
    """The training data."""

    aliases: ClassVar = {
        "data_path": "source",
        "processed_data_path": "source",
        "data_dir": "source",
        "dataset": "source",
    }

    # A folder of prepared data, or whatever ``tensorkeep data prepare`` takes.
    source: str = "stdlib"
    # How the source is prepared if it is not prepared data. The vocabulary size is for ``"bpe"`` only; ``validation``
    # is the fraction kept for validation.
    tokenizer: str = "char"
    vocab_size: int | None = None
    validation: Fraction = 0.1
    # The field of the lines of ``.jsonl`` files, or the column of tables, that holds the text.
    field: str = "text"
    # ``"shuffled"``: every window of an epoch once. ``"random"``: windows at random places.
    order: Literal["shuffled", "random"] = "shuffled"
    # Whether tokens attend to their own document only, although windows hold parts of several.
    mask_documents: bool = False


class LoopConfig(Section, frozen=True):
    """How long to train, where, and how much at a time."""

    aliases: ClassVar = {
        "max_iters": "steps",
        "max_steps": "steps",
        "num_steps": "steps",
        "iterations": "steps",
        "benchmark_iterations": "steps",
        "epochs": "steps",
        "num_epochs": "steps",
        "benchmark_epochs": "steps",
        "accumulate_grad_batches": "gradient_accumulation_steps",
        "grad_accum_steps": "gradient_accumulation_steps",
        "gpu": "device",
        "cuda": "device",
    }

    # Updates of the weights.
    steps: Count = 1000
    # Sequences in a batch, on all ranks together.
    batch_size: Count = 12
    # Batches per update.
    gradient_accumulation_steps: Count = 1
    # Whether a new run on a GPU chooses ``batch_size`` itself, as large as memory allows, and
    # ``gradient_accumulation_steps`` with it, so that an update has the same sequences. A resumed run keeps the choice.
    auto_batch_size: bool = False
    # Seeds the initial weights, the order of the data, and the global generators of torch (dropout), numpy and Python.
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1337
    # ``"auto"`` is the GPU if there is one, else the CPU; the CPU threads of torch, by default its own choice.
    device: str = "auto"
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    # At a loss or gradient that is not finite: ``"stop"``, or ``"skip"`` the update.
    on_divergence: Literal["stop", "skip"] = "stop"


class EvalConfig(Section, frozen=True):
    """When and on what the validation loss is measured."""

    aliases: ClassVar = {
        "eval_interval": "every",
        "eval_every": "every",
        "eval_iters": "tokens",
        "eval_batches": "tokens",
        "early_stopping": "patience",
    }

    # Steps from one evaluation to the next; 0 for one at the end only.
    every: Steps = 250
    # Tokens of the validation split to use, in windows that are spread evenly over it, the same each time; none for all
    # tokens.
    tokens: Count | None = 2**20
    # Deprecated form of ``tokens``, in batches of up to 16,384 tokens. ``batches`` wins if both are given.
    batches: Count | None = None
    # Stop early after this many evaluations without a better loss.
    patience: Count | None = None


class SampleConfig(Section, frozen=True):
    """Text that is generated while training."""

    aliases: ClassVar = {
        "sample_interval": "every",
    }

    # Steps from one sample to the next; 0 for none.
    every: Steps = 0
    # By default a new document, or a new line.
    prompt: str | None = None
    # See `chatgot.generate.generate`.
    tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    temperature: NonNegative = 0.8
    top_k: Count | None = None


class CheckpointConfig(Section, frozen=True):
    """When and how the run is saved; see `tensorkeep.CheckpointManager`.

    The last step is always saved, and so is every step with a new best validation loss, unless ``keep_best`` is 0.
    If ``store`` is the URL of a run in an object store, the steps are uploaded to it as well.
    """

    aliases: ClassVar = {
        "save_interval": "every",
        "save_every": "every",
        "save_steps": "every",
        "save_total_limit": "keep_last",
    }

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
    """How often a line is written to ``log.jsonl``, what it contains, and where its figures are sent as well."""

    aliases: ClassVar = {
        "log_interval": "every",
        "logging_steps": "every",
        "wandb_project": "wandb",
    }

    # Steps from one line about training to the next.
    every: Count = 10
    # Whether these lines have the gradient's norm in each block or layer; whether TensorBoard files are written.
    gradient_norms: bool = False
    tensorboard: bool = False
    # The project of Weights & Biases, and the experiment of MLflow, that the figures are sent to.
    wandb: str | None = None
    mlflow: str | None = None


class Config(Section, frozen=True):
    """The configuration of a training run.

    Examples
    --------
    >>> from chatgot.config.recipes import get_recipe
    >>> config = get_recipe("shakespeare-char-cpu").changed({"optim.lr": 3e-4})
    >>> config.setting("optim.lr"), config.loop.steps
    (0.0003, 2000)
    >>> config.changed({"techniques.compile.mode": "default", "loop.steps": "10"}).techniques
    {'compile': {'mode': 'default'}}
    """

    # The recipe that it was derived from.
    recipe: str
    # Opening a run raises its ``vocab_size`` to the vocabulary size of the data.
    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ema: AverageConfig = AverageConfig()
    log: LogConfig = LogConfig()
    # The settings of the techniques that are on, by name; a technique that cannot run is an error.
    techniques: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # msgspec copies it for each instance
    # The settings of the techniques that a new run turns on where they can run, by name.
    default_techniques: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needs_evaluations in (
            ("schedule.name", self.schedule.name == "plateau"),
            ("eval.patience", self.eval.patience is not None),
        ):
            if needs_evaluations and not self.eval.every:
                raise UsageError(
                    f"{name} is {self.setting(name)!r}, and eval.every is 0: there is no evaluation before the end",
                    remedy=f"give eval.every 250, for example, or leave {name} out",
                )
        splits = [name for name in _CHOOSE_FROM_BATCHES if name in self.techniques]
        if self.loop.auto_batch_size and splits:
            raise UsageError(
                f"loop.auto_batch_size is true, and {splits[0]} needs the batch size that you give",
                remedy="give loop.batch_size, or loop.auto_batch_size false",
            )
        if self.model.lora.rank and "lora" not in self.techniques:
            raise UsageError(
                f"model.lora.rank is {self.model.lora.rank}, and the technique lora is off",
                remedy=f"give --techniques.lora.rank {self.model.lora.rank} instead",
            )
        if self.model.lora.rank and self.optim.name == "muon":
            raise UsageError(
                "optim.name is 'muon', which is for full matrices, and lora trains adapters of low rank",
                remedy="give optim.name adamw",
            )

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that `as_dict` gave; see `read_settings` for the errors."""
        return read_settings(with_current_names(values), cls)

    def setting(self, name: str) -> Any:
        """Return the value of a setting by its dotted name, such as ``"optim.lr"``; UsageError if it does not exist."""
        values = flat(self.as_dict())
        name = RENAMED.get(name, name)
        if name not in values:
            raise unknown_setting(name)
        return values[name]

    def changed(self, settings: Mapping[str, object]) -> Self:
        """Return the configuration with some settings changed.

        A new ``data.tokenizer`` resets ``data.vocab_size``; a batch size, and a technique that depends on it, turn
        ``loop.auto_batch_size`` off; unless these are changed as well.

        Settings have dotted names, such as ``"optim.lr"``. Text is converted, and ``"none"`` means None. A technique is
        turned ``"on"`` or ``"off"`` by its name, ``"techniques.compile"``, and turned on by any of its
        settings; it is then no longer a default technique. ``"default_techniques"`` replaces all default techniques;
        ``"none"`` removes them. Raises UsageError if there is no such setting, or its value is not possible.
        """
        values = self.as_dict()
        known = flat(values)
        settings = {RENAMED.get(name, name): value for name, value in settings.items()}
        # A size that a recipe chose for byte pairs means nothing for another tokenizer.
        if settings.get("data.tokenizer", self.data.tokenizer) != self.data.tokenizer:
            values["data"]["vocab_size"] = None
        for name, value in settings.items():
            if name.startswith(TECHNIQUES):
                _set_technique(values, name.removeprefix(TECHNIQUES), value)
            elif name == DEFAULTS:
                if value is not None and value != "none" and not isinstance(value, Mapping):
                    remedy = f'give "none"; {TECHNIQUES}NAME on or off is for a single one'
                    raise UsageError(f"{DEFAULTS} is {value!r}", remedy=remedy)
                given = value if isinstance(value, Mapping) else {}
                values[DEFAULTS] = {each: dict(table) for each, table in given.items()}
            elif name.startswith(f"{DEFAULTS}."):
                remedy = f"give {TECHNIQUES}{name.removeprefix(f'{DEFAULTS}.')}"
                raise UsageError(f"{name} cannot be set by itself", remedy=remedy)
            elif name.startswith(GROUPS):
                _set_group(values["optim"]["groups"], name.removeprefix(GROUPS), value)
            elif name in known:
                *path, field = name.split(".")
                reduce(getitem, path, values)[field] = None if value == "none" else value
            else:
                raise unknown_setting(name)
        sizes = settings.keys() & {"loop.batch_size", "loop.gradient_accumulation_steps"}
        sizes |= values["techniques"].keys() & set(_CHOOSE_FROM_BATCHES)
        if sizes and "loop.auto_batch_size" not in settings:
            values["loop"]["auto_batch_size"] = False
        # All at once: settings may be valid in combination only.
        return read_settings(values, type(self))


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values of a configuration with each setting under its current name; see `RENAMED`."""
    found = dict(values)
    for old, new in RENAMED.items():
        section, _, field = old.partition(".")
        if isinstance(found.get(section), Mapping) and field in found[section]:
            rest = {name: value for name, value in found[section].items() if name != field}
            # Where both names are given, the current one counts.
            found[section] = {new.partition(".")[2]: found[section][field], **rest}
    return found


def _set_group(groups: dict[str, dict[str, Any]], name: str, value: object) -> None:
    # From the right: the pattern of a group may contain dots.
    pattern, _, field = name.rpartition(".")
    known = [each.name for each in msgspec.structs.fields(ParameterGroup)]
    if not pattern or field not in known:
        raise UsageError(
            f"{GROUPS}{name} is not a setting",
            remedy=f"give {' or '.join(f'{GROUPS}GROUP.{each}' for each in known)}",
        )
    groups.setdefault(pattern, {})[field] = None if value == "none" else value


def _set_technique(values: dict[str, Any], name: str, value: object) -> None:
    name, _, setting = name.partition(".")
    techniques: dict[str, dict[str, Any]] = values["techniques"]
    # A technique that the user sets is no longer a default: if it cannot run, that is an error.
    default = values[DEFAULTS].pop(name, {})
    if setting:
        techniques[name] = {**techniques.get(name, default), setting: value}
    elif isinstance(value, Mapping):
        techniques[name] = dict(value)
    elif value == "on":
        techniques.setdefault(name, default)
    elif value == "off":
        techniques.pop(name, None)
    else:
        raise UsageError(
            f"{TECHNIQUES}{name} is {value!r}", remedy=f'give "on", "off", or a setting: {TECHNIQUES}{name}.SETTING'
        )


def setting_names(kind: type[msgspec.Struct] = Config, prefix: str = "") -> list[str]:
    found: list[str] = []
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.name}"
        found += setting_names(field.type, f"{name}.") if _is_table(field.type) else [name]
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        # A technique without settings is on; an empty table of techniques holds no setting.
        if isinstance(value, Mapping) and (value or not prefix):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted name, as (first, second)."""
    before, after = flat(first.as_dict()), flat(second.as_dict())
    names = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def read_words(words: Sequence[str], options: Collection[str] = ()) -> tuple[str | None, dict[str, str]]:
    """Split the words of a command line into the recipe and the settings: ``--optim.lr 3e-4`` or ``--optim.lr=3e-4``.

    ``options`` are other options of the command, for suggestions. Raises UsageError if a setting is unknown or has no
    value, or there is a second recipe.
    """
    recipe: str | None = None
    settings: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            _check_option(name, options)
            # The next word is the value, even if it begins with a dash, as a negative number does.
            found = value if equals else next(rest, None)
            if found is None:
                raise UsageError(f"{name} has no value", remedy=f"write {name} VALUE")
            setting = name.removeprefix("--")
            settings[RENAMED.get(setting, setting)] = found
        elif recipe is None:
            recipe = word
        else:
            raise UsageError(f"{word!r} is not a setting", remedy="write --optim.lr 3e-4, for example")
    return recipe, settings


def _check_option(name: str, options: Collection[str]) -> None:
    settings = [f"--{each}" for each in setting_names() if each != "recipe"]
    if name in settings or name.removeprefix("--") in RENAMED or name.startswith((f"--{TECHNIQUES}", f"--{GROUPS}")):
        return
    if name == "--recipe":
        raise UsageError("there is no option --recipe", remedy="give the recipe as a word: tensorkeep train RECIPE")
    near = ", ".join(map(as_option, meanings(name, options)))
    raise UsageError(
        f"there is no option {name}",
        remedy=f"did you mean {near}?" if near else "see tensorkeep train --help, and --list-settings",
    )


def given_settings(
    words: Mapping[str, object] | None = None,
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    options: Collection[str] = (),
) -> dict[str, object]:
    """Return the settings that the user gave, by dotted name; of the TOML file, the tables within ``[train]`` count.

    ``options`` of the command, such as ``"--technique"``, may stand beside these tables.
    """
    known = setting_names()
    variables = dict(os.environ if environment is None else environment)
    for old, new in RENAMED.items():
        # Where both names are set, the current one counts.
        if (variable := environment_variable_of(old)) in variables:
            variables.setdefault(environment_variable_of(new), variables[variable])
    return merged(
        [name for name in known if "." in name],
        flags=words or {},
        environment=variables,
        file={} if file is None else _from_file(file, known, options),
    )


def ignored_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each environment variable that is meant as a setting, and is none."""
    known = {environment_variable_of(name) for name in [*setting_names(), *RENAMED]}
    tables = tuple(f"{PREFIX}{each.name.upper()}_" for each in msgspec.structs.fields(Config))
    # Other words may be options of other commands, such as TENSORKEEP_TEMPERATURE.
    aliases = {alias.upper() for _, kind in _tables(Config) for alias in kind.aliases}
    messages = []
    for name in sorted(os.environ if environment is None else environment):
        word = name.removeprefix(PREFIX)
        if name not in known and (name.startswith(tables) or (word != name and word in aliases)):
            near = [
                as_option(each) if each.startswith(TECHNIQUES) else environment_variable_of(each)
                for each in meanings(word)
                if " " not in each
            ]
            hint = f"did you mean {', '.join(near)}?" if near else "see tensorkeep train --list-settings"
            messages.append(f"{name} has no effect; {hint}")
    return messages


def _from_file(file: Path, known: Collection[str], options: Collection[str]) -> dict[str, Any]:
    tables = settings_file.named_tables(file)
    table = {
        name: value for name, value in tables.get("train", {}).items() if f"--{name.replace('_', '-')}" not in options
    }
    settings = flat(with_current_names(table))
    # The table [save] of the same file holds settings of checkpoints.
    if "save" in tables:
        settings.setdefault("checkpoint.settings", str(file.absolute()))
    for name in settings:
        if name not in known and not name.startswith((TECHNIQUES, GROUPS)):
            raise unknown_setting(name, path=file)
    return settings


def unknown_setting(name: str, *, path: PathLike | None = None) -> UsageError:
    """Return the error of a setting that does not exist; its remedy names the nearest ones that do."""
    near = ", ".join(meanings(name))
    remedy = f"did you mean {near}?" if near else "see tensorkeep train --list-settings"
    return UsageError(f"there is no setting {name!r}", path=path, remedy=remedy)


def meanings(word: str, options: Iterable[str] = ()) -> list[str]:
    """Return up to three settings that an unknown word may mean, such as ``["optim.lr"]`` for ``"learning_rate"``.

    ``"techniques.compile"`` is a technique, and ``"model.norm rmsnorm"`` a setting with a value. ``options`` of the
    command, such as ``"--resume"``, count as well.
    """
    known = {_plain(option): [option] for option in options} | _meanings()
    # A section may be missing or wrong, and flags of other programs are named `--use_amp`.
    spellings = _plain(word), _plain(word.rpartition(".")[2]), _plain(word).removeprefix("use")
    found = next((known[each] for each in spellings if each in known), None)
    if found is None:
        # A mistyped value of one setting would hide a name that is spelled nearly the same.
        names = [each for each, (first, *_) in known.items() if " " not in first]
        found = [meaning for each in difflib.get_close_matches(spellings[0], names, n=1) for meaning in known[each]]
    return list(dict.fromkeys(found))[:3]


@cache
def _meanings() -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}
    for word, meaning in _words():
        known.setdefault(_plain(word), []).append(meaning)
    return known


def _words() -> Iterator[tuple[str, str]]:
    """Yield what techniques, settings and their values are called, and what to write: techniques first, values last."""
    # Techniques are found by their entry points, because their modules import this one.
    classes: list[Any] = list(Registry("technique", "chatgot"))
    for each in classes:
        setting = f"{TECHNIQUES}{each.name}"
        yield from ((word, setting) for word in (each.name, setting, *each.aliases))
    tables = [*_tables(Config), *((f"{TECHNIQUES}{each.name}.", each.Settings) for each in classes)]
    fields = [
        (prefix, kind, field)
        for prefix, kind in tables
        for field in msgspec.structs.fields(kind)
        if not _is_table(field.type)
    ]
    for prefix, kind, field in fields:
        table = prefix.rstrip(".").rpartition(".")[2]
        words = f"{prefix}{field.name}", f"{table}{field.name}", field.name  # as in --compile_mode
        aliases = [alias for alias, name in kind.aliases.items() if name == field.name]
        yield from ((word, f"{prefix}{field.name}") for word in (*words, *aliases))
    # Of two settings, the one of a technique comes first: it also does what belongs to the value.
    for prefix, _, field in reversed(fields):
        yield from ((value, f"{prefix}{field.name} {value}") for value in choices(field.type))


def _tables(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    yield prefix, kind
    for field in msgspec.structs.fields(kind):
        if _is_table(field.type):
            yield from _tables(field.type, f"{prefix}{field.name}.")


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def as_option(meaning: str) -> str:
    """Return a setting of `meanings` as it is written on the command line: ``--technique compile``, ``--optim.lr``."""
    section, _, name = meaning.partition(".")
    if f"{section}." == TECHNIQUES and "." not in name:
        return f"--technique {name}"
    return f"--{meaning.removeprefix('--')}"
