"""Exporting a trained model as a folder that Hugging Face transformers opens."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from chatgot.data.tokenizers.base import library
from chatgot.data.tokenizers.chat import TEMPLATE
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.model.huggingface import architecture_of, refuse_mismatch
from chatgot.model.layers import merge_adapters
from tensorkeep import save
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.ext import checked_path
from tensorkeep.ext.storage import Commit, remove_abandoned, write_small

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What `export` wrote."""

    path: str
    # The class in transformers: ``"GPT2LMHeadModel"``, ``"LlamaForCausalLM"`` or ``"Qwen3ForCausalLM"``.
    architecture: str
    # Elements of the written tensors; tied weights count once.
    parameters: int
    dtype: str
    # The size of all files.
    stored_bytes: int
    files: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    model_or_state: GPT | Mapping[str, Tensor],
    config: ModelConfig,
    folder: PathLike,
    *,
    tokenizer_json: str | None = None,
    begin_of_document: int | None = None,
    end_of_document: int | None = None,
    end_of_message: int | None = None,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` opens; it appears when complete.

    A model with learned positions, LayerNorm and GELU becomes a GPT-2; a model with rotary positions, RMSNorm, SwiGLU
    and no biases becomes a LLaMA, or with ``qk_norm`` a Qwen 3. The logits are the same up to rounding. The export
    needs memory for a copy of the weights.

    Parameters
    ----------
    model_or_state : GPT or mapping of str to Tensor
        The model, or its ``state_dict()``. Adapters (LoRA) are added to the weights.
    config : ModelConfig
        The configuration of the model.
    folder : path-like
        The folder to make; missing parent folders are created.
    tokenizer_json : str, optional
        The text of a ``tokenizer.json`` of Hugging Face's tokenizers, for ``AutoTokenizer``.
    begin_of_document : int, optional
        The token that begins each text; by default ``end_of_document``, which the tokenizer does not add.
    end_of_document : int, optional
        The token that ends generation.
    end_of_message : int, optional
        The token that ends the messages of a conversation, and generation, too; the tokenizer gets a chat template.
    dtype : torch.dtype or str, optional
        Round the weights to float32, bfloat16 or float16; by default the dtype of the token embedding.
    overwrite : bool
        Replace an earlier export.

    Returns
    -------
    ExportReport

    Raises
    ------
    UnsupportedError
        If transformers has no architecture for the configuration; the message names the settings that prevent it.
    StateMismatchError
        If the tensors do not match the configuration.
    UsageError, MissingExtraError
        If another argument is invalid, or a tokenizer is given and the package ``tokenizers`` is not installed.
    DestinationExistsError, BusyError, StoreError
        If the folder cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> config = ModelConfig(vocab_size=9, context_length=8, n_layers=1, n_heads=1, d_model=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export(GPT(config), config, f"{folder}/exported")
    >>> report.architecture, report.files
    ('GPT2LMHeadModel', ('model.safetensors', 'config.json'))
    """
    architecture = architecture_of(config)
    state, config = merge_adapters(_checked_state(model_or_state, config), config)
    state, config = _without_padding(state, config)
    target = str(state["tokens.weight"].dtype if dtype is None else dtype).removeprefix("torch.")
    if target not in _DTYPES:
        raise UsageError(f"the dtype is {target}", remedy=f"choose one of {', '.join(_DTYPES)}")
    special = {
        "begin_of_document": begin_of_document,
        "end_of_document": end_of_document,
        "end_of_message": end_of_message,
    }
    for name, token in special.items():
        if token is not None and not 0 <= token < config.vocab_size:
            raise UsageError(
                f"the {name.replace('_', ' ')} is token {token}, and the model has tokens 0 to {config.vocab_size - 1}",
                remedy="give the token of the tokenizer, or leave it out",
            )
    ends = [each for each in (end_of_message, end_of_document) if each is not None]
    document = {
        "architectures": [architecture.name],
        **architecture.settings(config),
        "vocab_size": config.vocab_size,
        "initializer_range": float(config.init_std),
        "tie_word_embeddings": config.tied,
        "torch_dtype": target,
        # Without these entries, transformers takes the tokens of the published models.
        "bos_token_id": end_of_document if begin_of_document is None else begin_of_document,
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": None,
    }
    contents = {CONFIG: _json(document)}
    if tokenizer_json is not None:
        named = {"bos_token": begin_of_document, "eos_token": ends[0] if ends else None}
        contents |= _tokenizer_files(tokenizer_json, config, named, talks=end_of_message is not None)
    renamed = architecture.tensors(state, config)
    # Copies: safetensors writes only the first of several tensors that share memory.
    tensors = {name: tensor.detach().to("cpu", _DTYPES[target], copy=True) for name, tensor in renamed}
    with Commit(Path(checked_path(folder)), directory=True, overwrite=overwrite, replaceable=_is_export) as commit:
        saved = save(tensors, commit.path / WEIGHTS, format="safetensors", compression="none")
        # Temporaries that `save` could not remove would be published as well.
        remove_abandoned(commit.path)
        for name, content in contents.items():
            write_small(commit.path / name, content)
        commit.publish()
    return ExportReport(
        path=os.fspath(commit.destination),
        architecture=architecture.name,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        dtype=target,
        stored_bytes=saved.stored_bytes + sum(map(len, contents.values())),
        files=(WEIGHTS, *contents),
    )


def _is_export(path: Path) -> bool:
    # `overwrite` replaces a folder only if an export wrote all its files.
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    return {CONFIG, WEIGHTS} <= names <= {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG}


def _checked_state(model_or_state: GPT | Mapping[str, Tensor], config: ModelConfig) -> Mapping[str, Tensor]:
    if isinstance(model_or_state, GPT):
        if model_or_state.config != config:
            raise UsageError("the configuration is not the model's", remedy="give model.config")
        return model_or_state.state_dict()
    state: dict[str, Any] = dict(model_or_state)
    # On the meta device: shapes without memory.
    wanted = {name: tensor.shape for name, tensor in GPT(config, device="meta").state_dict().items()}
    # A tied head is the embedding, and may be left out.
    if config.tied:
        state.pop("head.weight", None)
        wanted.pop("head.weight")
    common = sorted(wanted.keys() & state.keys())
    refuse_mismatch(
        "the tensors do not match the configuration",
        "give the state_dict() of the model, and its configuration",
        missing=sorted(wanted.keys() - state.keys()),
        extra=sorted(state.keys() - wanted.keys()),
        different=[name for name in common if getattr(state[name], "shape", None) != wanted[name]],
    )
    return state


def _without_padding(state: Mapping[str, Tensor], config: ModelConfig) -> tuple[Mapping[str, Tensor], ModelConfig]:
    if not config.vocab_padding:
        return state, config
    # Padding rows are the last ones.
    cut = {name: state[name][: config.n_tokens] for name in ("tokens.weight", "head.weight") if name in state}
    return {**state, **cut}, msgspec.structs.replace(config, vocab_size=config.n_tokens, vocab_padding=0)


def _tokenizer_files(
    text: str, config: ModelConfig, special: Mapping[str, int | None], *, talks: bool
) -> dict[str, bytes]:
    """Return both files of a tokenizer; UsageError if a token is not in the vocabulary of the model."""
    tokenizers = library("tokenizers")
    try:
        tokens = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(
            f"the tokenizer is not a tokenizer.json ({error})", remedy="give what Tokenizer.to_str() returns"
        ) from error
    # A token beyond the vocabulary would index past the end of the embedding.
    largest = max(tokens.values(), default=0)
    if largest >= config.vocab_size:
        raise UsageError(
            f"the tokenizer has the token {largest}, and the model has tokens 0 to {config.vocab_size - 1}",
            remedy="give the tokenizer that the model was trained with",
        )
    names = {number: token for token, number in tokens.items()}
    template = TEMPLATE if special["bos_token"] is None else "{{ bos_token }}" + TEMPLATE
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        # transformers would remove spaces before punctuation, which the text may have.
        "clean_up_tokenization_spaces": False,
        **{name: names[number] for name, number in special.items() if number in names},
        **({"chat_template": template} if talks else {}),
    }
    return {TOKENIZER_CONFIG: _json(document), TOKENIZER: text.encode()}


def _json(document: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document))
