"""The predicted memory of training, in bytes, computed from shapes; see `packages/chatgot/tests/test_memory.py`."""

import gc
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chatgot.config.config import Config
from chatgot.data.batches import LARGEST_TOKENS
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.optim.muon import dtype_of_steps, update_bytes
from chatgot.optim.optimizers import fused_projections
from chatgot.techniques.base import MemoryEffects
from chatgot.techniques.stack import Stack

_FLOAT, _HALF, _INDEX = 4, 2, 8

# With activation swapping, the activations of this many blocks are on the GPU at once.
_BLOCKS_NOT_SWAPPED = 2
# Copies of the logits that exist at once: their log-softmax, and the gradient twice.
_LOGITS_COPIES = 3

_ADAMW = 2 * _FLOAT
_QUANTISED_FROM = 4096
# Quantised states of torchao: bytes of an element, elements that share a scale, entries of the lookup table.
_LOW_BITS: dict[str, tuple[float, int, int]] = {"8": (1.0, 256, 256), "4": (0.5, 128, 16), "fp8": (1.0, 256, 0)}

# Memory that an evaluation may take, however little memory a step of training takes.
LEAST_BYTES = 2**28


class Activations(NamedTuple):
    """The bytes that autograd keeps of one micro-batch, from the forward to the backward pass."""

    model: ModelConfig
    rows: int
    # Bytes of an element of a matmul operand.
    width: int
    # On the device, without the logits.
    kept: int
    # What exists in addition while activation checkpointing recomputes a block.
    recomputed: int
    # At the start of the backward pass.
    logits: int


def activations_of(model: ModelConfig, *, rows: int, on_cuda: bool, effects: MemoryEffects) -> Activations:
    tokens, width, features = rows * model.context_length, effects.element_bytes, model.d_model
    # From here to the logits: bytes of a token.
    norm = features + (2 if model.norm == "layernorm" else 1)
    # torch has no fused RMSNorm for CPUs, and keeps the factor of the weights.
    norm = _FLOAT * (norm + (features if model.norm == "rmsnorm" and not on_cuda else 0))
    # A copy of the embeddings or of the output of a norm: both are float32.
    shift = _FLOAT * features
    # On a CPU, the mask is as wide as the values.
    mask, first_mask = ((1 if on_cuda else each) * features if model.dropout else 0 for each in (width, _FLOAT))
    hidden = (2 if model.gated else 1) * width * model.mlp_width
    # The outputs of the norms; the projection of a gate makes another 16-bit copy.
    returned = (3 if model.gated and width < _FLOAT else 2) * width * features
    block = 2 * norm + returned + _attention(model, width, on_cuda, effects) + 2 * hidden + 2 * mask
    block += 2 * shift if model.token_shift == "blocks" else 0
    # Token ids, the final norm with its output, and the dropout of the embeddings.
    kept = _INDEX + norm + width * features + first_mask + (shift if model.token_shift else 0)
    every = effects.checkpoint_every
    checkpointed = 0 if every is None else -(-model.n_layers // every)
    kept += checkpointed * _checkpointed_block(model, width, effects) + (model.n_layers - checkpointed) * block
    if effects.swaps_activations:
        kept = min(kept, _BLOCKS_NOT_SWAPPED * block)
    recomputed = 0 if every is None else block + hidden + _FLOAT * features
    chunk = tokens if effects.loss_chunks is None else -(-tokens // effects.loss_chunks)
    logits = _LOGITS_COPIES * _FLOAT * chunk * model.vocab_size
    # In chunks, the gradients of features and head exist as well.
    logits += 0 if effects.loss_chunks is None else _FLOAT * features * (tokens + model.vocab_size)
    return Activations(model, rows, width, tokens * kept, tokens * recomputed, logits)


def _attention(model: ModelConfig, width: int, on_cuda: bool, effects: MemoryEffects) -> int:
    heads, keys = model.attention_width, model.n_kv_heads * model.head_size
    # The output, and the copy of queries, keys and values that the convolution makes.
    output = width * (4 * heads if model.convolution > 1 else heads)
    # torch's fused kernel for CPUs does not support dropout: the math kernel, which keeps the scores, takes over.
    if effects.attention_kernel == "math" or (model.dropout > 0 and not on_cuda):
        # In float32: scaled queries and keys, values, softmax, the mask of dropout and its result.
        scores = (3 if model.dropout else 1) * model.context_length * model.n_heads
        return output + _FLOAT * (3 * heads + scores)
    if effects.attention_kernel == "matmul":
        # Queries, keys and values of every head, and queries and keys before their norms.
        before = heads + 2 * keys if model.qk_norm else 0
        return output + width * (before + 3 * heads + model.context_length * model.n_heads)
    half, both = width < _FLOAT, heads + keys
    # Rotation and norms make copies of queries and keys. Values are a part of a projection, which is kept whole.
    copied = model.positions == "rotary" or model.qk_norm
    kept = 3 * heads
    if model.grouped:
        # A norm in 32 bits keeps its input, and the second projection another 16-bit copy of its own.
        kept = 2 * keys + (heads if half or model.qk_norm or not copied else 0)
        kept += heads if half and not copied else 0
    projected = width * (kept + (both if copied else 0))
    if model.qk_norm:
        # A copy in 32 bits, the normalised heads as in a norm of the block, and one factor for each head.
        copies = (1 if half else 0) + (0 if on_cuda else 1)
        projected += _FLOAT * (copies * both + both // model.head_size)
    return output + projected + _FLOAT * model.n_heads


def _checkpointed_block(model: ModelConfig, width: int, effects: MemoryEffects) -> int:
    kept = _FLOAT * model.d_model
    if not effects.keeps_matmuls:
        return kept
    projected = model.attention_width + 2 * model.n_kv_heads * model.head_size
    # The output of attention, and the outputs of the two projections to the residual stream.
    matmuls = projected + model.attention_width + 2 * model.d_model + (2 if model.gated else 1) * model.mlp_width
    return kept + width * matmuls + _FLOAT * model.n_heads


def evaluation_rows(training: Activations) -> int:
    """Return how many windows to evaluate at once, in no more memory than one micro-batch of training takes."""
    # From the settings alone, so that a resumed run evaluates the same batches.
    budget, length = max(LEAST_BYTES, training.kept + training.logits), training.model.context_length
    row = evaluation_bytes(training.model, 1, width=training.width)
    return max(1, min(budget // row, max(LARGEST_TOKENS // length, training.rows)))


def evaluation_bytes(model: ModelConfig, rows: int, *, width: int = _FLOAT) -> int:
    """Return the temporary memory of a forward pass without gradients: the larger of an MLP and the logits."""
    # In an MLP exist the residual stream before and after the attention, its norm, the input and the output of the
    # activation function, and a factor between them or the result of the MLP.
    streams, hidden = (3, 3) if model.gated or model.activation == "relu2" else (4, 2)
    # The logits and their log-softmax. Logits of 16 bits (``width``, in bytes) exist in float32 as well.
    logits = 2 * _FLOAT + (_HALF if width == _HALF else 0)
    floats = streams * model.d_model + hidden * model.mlp_width
    return rows * model.context_length * max(_FLOAT * floats, logits * model.vocab_size)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of training in bytes, by purpose."""

    parameters: int
    gradients: int
    optimizer: int
    # The moving average of ``ema``.
    average: int
    # 16-bit copies of weights, if matmuls are computed in 16 bits.
    copies: int
    # Kept for the backward pass, without the logits.
    activations: int
    # What exists in addition while activation checkpointing recomputes a block.
    recomputed: int
    # At the start of the backward pass: their log-softmax, and the gradient twice.
    logits: int
    # Temporary memory of an optimizer step.
    update: int
    # Temporary memory of an evaluation between two steps.
    evaluation: int
    # Whether gradients exist from one micro-batch to the next.
    accumulated: bool
    # Techniques that are on, without a prediction of their effect on memory.
    unknown: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        # Twice the average: while it is in the model, the weights themselves are kept in a copy.
        return max(self.peak_of_steps, self.parameters + self.optimizer + 2 * self.average + self.evaluation)

    @property
    def peak_of_steps(self) -> int:
        # The peak is at the start of the backward pass, when all activations exist, or in the step of the optimizers,
        # when all gradients exist.
        always = self.parameters + self.optimizer + self.average
        backward = self.copies + self.activations + max(self.logits, self.recomputed)
        return always + max(backward + self.gradients * self.accumulated, self.gradients + self.update)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "unknown": list(self.unknown), "peak_of_steps": self.peak_of_steps, "peak": self.peak}


def predict(config: Config, *, device: str) -> Ledger:
    """Return the ledger of a run on ``"cpu"`` or ``"cuda"``, with the vocabulary size of its data in the model."""
    stack, on_cuda = Stack.of(config.techniques), device == "cuda"
    # Only algorithmic ones: systems techniques may measure the machine, or refuse this one.
    for each in stack.techniques:
        if each.kind == "algorithmic":  # these may change the model
            config = each.configure(config)
    effects = stack.memory_effects()
    predicted = {each.name for each in stack.techniques if each.predicts_memory}
    model = GPT(config.model, device="meta")
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    parameters = _FLOAT * sum(each.numel() for each in model.parameters())
    rows = -(-config.loop.batch_size // effects.micro_batches)
    activations = activations_of(config.model, rows=rows, on_cuda=on_cuda, effects=effects)
    # The 16-bit copies of all weights of matmuls are made for each micro-batch; a tied weight counts once.
    linear = {id(each.weight): 2 * each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear)}
    return Ledger(
        parameters=parameters,
        gradients=_FLOAT * sum(each.numel() for each in trained.values()),
        optimizer=sum(_state_bytes(config, name, each, effects, on_cuda) for name, each in trained.items()),
        average=parameters if config.ema.decay else 0,
        copies=sum(linear.values()) if activations.width < _FLOAT else 0,
        activations=activations.kept,
        recomputed=activations.recomputed,
        logits=activations.logits,
        update=_update(config, trained, effects, device),
        evaluation=evaluation_bytes(config.model, evaluation_rows(activations), width=activations.width),
        accumulated=config.loop.gradient_accumulation_steps * effects.micro_batches > 1,
        unknown=tuple(name for name in config.techniques if name not in predicted),
    )


def _updated_by_muon(config: Config, name: str, parameter: Tensor) -> bool:
    return config.optim.name == "muon" and name.startswith("blocks.") and parameter.ndim == 2


def _state_bytes(config: Config, name: str, parameter: Tensor, effects: MemoryEffects, on_cuda: bool) -> int:
    count = parameter.numel()
    if _updated_by_muon(config, name, parameter):
        return _FLOAT * count + (_FLOAT * parameter.shape[0] if config.optim.muon_beta2 else 0)
    if on_cuda and effects.offloads_states:
        # The states are in the memory of the host.
        return 0
    if effects.state_bits is None:
        return _ADAMW * count
    element, shared, table = _LOW_BITS[effects.state_bits]
    # Such tensors keep states in float32.
    if count < _QUANTISED_FROM or count % shared:
        return _ADAMW * count
    return round(2 * (element * count + _FLOAT * (count / shared + table)))


def _update(config: Config, parameters: dict[str, nn.Parameter], effects: MemoryEffects, device: str) -> int:
    muons: list[Tensor] = []
    rest: list[int] = []
    for name, each in parameters.items():
        if not _updated_by_muon(config, name, each):
            rest.append(each.numel())
        elif config.optim.muon_split:
            muons += each.chunk(fused_projections(name))
        else:
            muons.append(each)
    # AdamW updates all weights at once on CUDA, and needs no memory if the kernel is fused.
    at_once = device == "cuda" and effects.state_bits is None and not effects.offloads_states
    adamw = _FLOAT * (sum(rest) if at_once or config.optim.implementation == "foreach" else max(rest))
    if config.optim.implementation == "fused" or effects.fuses_update:
        adamw = 0
    # The optimizers step one after the other, so the larger one counts.
    return max(adamw, update_bytes(muons, dtype_of_steps(device)))


def live_bytes() -> int:
    """Return the bytes of all tensors of this process on the CPU."""
    # Dead cycles would still count.
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # Not isinstance: it would call the properties of lazy modules and proxies.
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu" and found.layout == torch.strided:
            # Subclasses that wrap other tensors, such as quantised ones, have no memory of their own.
            try:
                storage = found.untyped_storage()
                address = storage.data_ptr()
            except RuntimeError:
                continue
            # Tensors that share storage count once.
            if address:
                storages[address] = storage.nbytes()
    return sum(storages.values())
