"""The weights of other runs and models: the trained model of a run, and the weights that a run starts from."""

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from chatgot.config.config import Config, flat
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import is_prepared
from chatgot.data.tokenizers.base import Tokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.data.tokenizers.registry import FROM, tokenizer_at
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.model.huggingface import convert_weights, read_model_config
from chatgot.model.layers import merge_adapters
from chatgot.run.folder import METRIC, InitialRecord, RunFolder
from chatgot.step.device import chosen_device
from tensorkeep import CheckpointManager, Step, load
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.ext.checkpoint import backend_of, find_checkpoint, split_address
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import store_errors

Which = Literal["last", "best"]


class TrainedModel(NamedTuple):
    # In evaluation mode.
    model: GPT
    tokenizer: Tokenizer
    step: Step
    folder: RunFolder


def load_trained_at(address: PathLike, *, which: Which = "last", device: str = "auto") -> TrainedModel:
    """Return the model of a run at the address of its folder, its ``checkpoints/``, or one step such as ``run@1200``.

    It has the averaged weights, if the run averages them. ``"best"`` is by the validation loss.
    """
    folder, address_step = RunFolder.at(address)
    step = None
    if address_step is not None:
        if which != "last":
            raise UsageError(f"both a step and {which!r} are given", path=address, remedy=f"leave out --which {which}")
        step = backend_of(folder.checkpoints).read(find_checkpoint(f"{folder.checkpoints}@{address_step}").step or 0)
    config = folder.record().config
    tokenizer = folder.tokenizer()
    if step is None:
        manager = CheckpointManager(folder.checkpoints)
        step = manager.best(METRIC) if which == "best" else manager.latest()
    if step is None:
        raise NotACheckpointError(
            f"holds no {which} checkpoint",
            path=folder.checkpoints,
            remedy="take the last one: --which last" if which == "best" else "resume the run",
        )
    model = GPT(config.model, device=chosen_device(device))
    mask_documents(model, config, tokenizer)
    name = "average" if config.ema.decay else "model"
    with torch.no_grad():
        tensors = {key: weight.detach() for key, weight in model.named_parameters()}
        # Only the weights are read: a checkpoint also holds the states of the optimizers.
        load(step.path, into={name: tensors}, select=[f"{name}.{key}" for key in tensors])
    return TrainedModel(model.eval(), tokenizer, step, folder)


def mask_documents(model: GPT, config: Config, tokenizer: Tokenizer) -> None:
    """Keep the attention of a model within documents, if the run of this configuration does."""
    model.document_end = tokenizer.end_of_document if config.data.mask_documents else None


CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Settings of a model that a run may choose, whatever the weights are.
_CHOSEN_BY_THE_RUN = ("dropout", "init_std", "context_length", "vocab_multiple", "vocab_padding")
_ROWS_BY_TOKEN = ("tokens.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The weights of a model by their names in `GPT`, their entry in the record of a run, and their tokenizer."""

    record: InitialRecord
    # The model that they come from.
    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None
    # Of the run or the model.
    folder: Path
    # Why the tokenizer is not known.
    without_tokenizer: str = ""

    @property
    def known_tokens(self) -> int:
        """How many tokens the weights were trained with, as far as that is known."""
        rows = self.config.n_tokens
        return rows if self.tokenizer is None else min(rows, self.tokenizer.vocab_size)

    def new_tokens(self, model: ModelConfig) -> int:
        """Return how many tokens of a model the weights were not trained with: tokens of messages, or padding."""
        return max(0, model.n_tokens - self.known_tokens)

    @property
    def tokens_in_no_text(self) -> int:
        """How many tokens of the tokenizer have no row in the weights, and occur in no text: padding for example."""
        if self.tokenizer is None:
            return 0
        beyond = set(range(self.config.n_tokens, self.tokenizer.vocab_size))
        return len(beyond & self.tokenizer.reserved - {self.tokenizer.end_of_document})

    def model_settings(self, config: Config) -> dict[str, object]:
        """Return the settings of a run that the weights decide, by dotted name."""
        model = msgspec.structs.replace(
            self.config,
            # A run may use a shorter context than the weights, but not a longer one.
            context_length=min(self.config.context_length, config.model.context_length),
            dropout=config.model.dropout,
            init_std=config.model.init_std,
            vocab_multiple=config.model.vocab_multiple,
            lora=config.model.lora,
        )
        found: dict[str, object] = flat({"model": msgspec.to_builtins(model)})
        if self.tokenizer is not None:
            found["data.tokenizer"] = f"{FROM}:{self.folder}"
        return found

    def check(self, model: ModelConfig) -> None:
        """Raise UsageError if the weights do not fit a model; the message names the setting."""
        source, wanted = (flat(msgspec.to_builtins(each)) for each in (self.config, model))
        for name, value in wanted.items():
            # The embedding and the head may get more rows; see `values`.
            grown = name == "vocab_size" and value > self.config.vocab_size
            if (
                not grown
                and name not in _CHOSEN_BY_THE_RUN
                and not name.startswith("lora.")
                and source.get(name) != value
            ):
                raise UsageError(
                    f"model.{name} is {value!r}, and the initial weights are of a model with {source.get(name)!r}",
                    path=self.record.path,
                    remedy=f"leave model.{name} out, and techniques that change it",
                )
        if model.positions == "learned" and model.context_length > self.config.context_length:
            raise UsageError(
                f"model.context_length is {model.context_length}, and the initial weights have "
                f"{self.config.context_length} learned positions",
                path=self.record.path,
                remedy=f"give --model.context_length {self.config.context_length} or less",
            )
        trained = self.new_tokens(model) - self.tokens_in_no_text
        if model.lora.rank and trained > 0:
            raise UsageError(
                f"lora trains adapters alone, and {trained} tokens of conversations are new to the "
                "initial weights: their embeddings would never be trained",
                path=self.record.path,
                remedy="leave lora out, or start from a run that was trained on conversations",
            )

    def check_source(self, source: str, given: Collection[str]) -> None:
        """Raise UsageError if text would get tokens that the weights do not know, and the user did not ask for them."""
        if self.tokenizer is None and "data.tokenizer" not in given and not is_prepared(source):
            raise UsageError(
                f"the tokenizer of the initial weights is not known: {self.without_tokenizer}",
                path=self.record.path,
                remedy="save it beside the weights (tokenizer.save_pretrained), if it is byte-level as GPT-2's and "
                "LLaMA 3's, or state the one that they were trained with (--data.tokenizer)",
            )

    def check_data(self, dataset: Dataset) -> None:
        """Raise UsageError if data has tokens that the weights were not trained with, except the tokens of messages."""
        known, used, rows = self.tokenizer, dataset.tokenizer, self.config.n_tokens
        prepare = f"tensorkeep data prepare SOURCE --tokenizer {shlex.quote(f'{FROM}:{self.folder}')} --out NEW"
        remedy = f"prepare the data with the tokenizer of the model: {prepare}"
        if known is None:
            remedy = f"save the tokenizer of the model beside its weights (tokenizer.save_pretrained), then {prepare}"
        different = None if known is None else first_difference(used, known)
        if _text_tokens(used) > self.config.vocab_size and (known is None or different is not None):
            problem = (
                f"the data has a vocabulary of {_text_tokens(used):,} tokens, and the initial weights one of "
                f"{self.config.vocab_size:,}"
            )
            raise UsageError(problem, path=dataset.path, remedy=remedy)
        if different is not None:
            problem = (
                f"token {different} of the data is another one than token {different} of the initial weights: the data "
                f"was prepared with {used.name}"
            )
            raise UsageError(problem, path=dataset.path, remedy=remedy)
        untrained = set(range(rows, _text_tokens(used))) - used.reserved
        if untrained:
            raise UsageError(
                f"token {min(untrained)} of the tokenizer occurs in text, and the initial weights have {rows:,} rows",
                path=self.record.path,
                remedy="give a folder with a tokenizer and weights that belong together",
            )

    def values(self, model: ModelConfig) -> dict[str, Tensor]:
        """Return the initial values of the parameters of a model that `check` accepted; new tokens get the mean."""
        values = dict(self.tensors)
        for name in _ROWS_BY_TOKEN:
            if name in values:
                values[name] = self._with_new_tokens(values[name], model)
        if model.positions == "learned":
            values["positions.weight"] = values["positions.weight"][: model.context_length]
        return values

    def _with_new_tokens(self, known: Tensor, model: ModelConfig) -> Tensor:
        if not self.new_tokens(model) and model.vocab_size == len(known):
            return known
        rows = known.new_zeros(model.vocab_size, known.shape[1])
        rows[: len(known)] = known
        # Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021.
        # Neither likely nor impossible, so that the first steps do not spend their gradient on the new tokens.
        rows[self.known_tokens : model.n_tokens] = known[: self.known_tokens].mean(0)
        return rows


def read_initial(address: PathLike) -> InitialWeights:
    """Return the weights of a run (``run``, ``run@1200``, ``run@best``) or of a Hugging Face folder."""
    place, step = split_address(address)
    folder = Path(os.path.abspath(place))
    if RunFolder(folder).exists():
        return _of_run(address, folder)
    if step is None and (folder / CONFIG).exists():
        return _of_hugging_face(folder)
    raise NotACheckpointError(
        f"is neither a run nor a Hugging Face model ({CONFIG} and safetensors files)",
        path=place,
        remedy="give the folder of a run, RUN@STEP, or the folder of a model",
    )


def _of_run(address: PathLike, folder: Path) -> InitialWeights:
    trained = load_trained_at(address, device="cpu")
    state, config = merge_adapters(trained.model.state_dict(), trained.model.config)
    # A tied head is listed once, as the embedding.
    tensors = {name: state[name] for name, _ in GPT(config, device="meta").named_parameters()}
    record = InitialRecord(path=str(folder), kind="run", step=trained.step.number, fingerprint=_fingerprint(tensors))
    return InitialWeights(record, config, tensors, trained.tokenizer, folder)


def _of_hugging_face(folder: Path) -> InitialWeights:
    with store_errors(folder / CONFIG, "read the configuration"):
        content = (folder / CONFIG).read_bytes()
    try:
        document: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"is not a JSON object ({error})", path=folder / CONFIG) from error
    file = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
    if file is None:
        raise NotACheckpointError(
            f"has none of {' and '.join(_WEIGHTS)}",
            path=folder,
            remedy="save the model as safetensors: model.save_pretrained(FOLDER, safe_serialization=True)",
        )
    try:
        config = read_model_config(document)
        tensors = convert_weights(load(folder if file.suffix == ".json" else file), config)
    except TensorkeepError as error:
        error.path = error.path or os.fspath(folder)
        raise
    record = InitialRecord(path=str(folder), kind="hugging-face", step=None, fingerprint=_fingerprint(tensors))
    try:
        tokenizer, reason = tokenizer_at(folder), "its folder has none"
    except UnsupportedError as error:
        tokenizer, reason = None, error.message
    return InitialWeights(record, config, tensors, tokenizer, folder, reason)


def _fingerprint(tensors: dict[str, Tensor]) -> str:
    """Return the xxh3-64 of names, shapes and values, as 16 hexadecimal digits."""
    hasher = checksummed_json.new_hasher()
    for name in sorted(tensors):
        # A reshaped copy has the same bytes, and is another weight.
        hasher.update(f"{name} {[*tensors[name].shape]} {tensors[name].dtype}".encode())
        hasher.update(tensors[name].contiguous().numpy())
    return hasher.hexdigest()


def first_difference(used: Tokenizer, known: Tokenizer) -> int | None:
    """Return the first token that differs between two tokenizers; None if all are the same."""
    if used.digest == known.digest:
        return None
    both = min(used.vocab_size, known.vocab_size)
    for token in range(both):
        if used.token_bytes(token) != known.token_bytes(token):
            return token
    # The known tokenizer need not have the reserved tokens of conversations.
    return both if both < _text_tokens(used) else None


def _text_tokens(tokenizer: Tokenizer) -> int:
    return tokenizer.text.vocab_size if isinstance(tokenizer, ChatTokenizer) else tokenizer.vocab_size
