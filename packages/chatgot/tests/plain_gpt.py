"""The model, written as plainly as it can be: one position and one head at a time, to compare `GPT` with."""

import math

import torch
from torch import Tensor

from chatgot.model.config import ModelConfig

Weights = dict[str, Tensor]


def logits(config: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Return the logits after each position, of shape [batch, positions, vocab_size], without dropout."""
    return torch.stack([_of_one_sequence(config, weights, row.tolist()) for row in tokens])


def _of_one_sequence(config: ModelConfig, weights: Weights, tokens: list[int]) -> Tensor:
    stream = [weights["tokens.weight"][token] for token in tokens]
    if config.token_shift:
        stream = _with_earlier(stream, [weights["shift.share"]])
    if config.positions == "learned":
        stream = [x + weights["positions.weight"][position] for position, x in enumerate(stream)]
    for number in range(config.n_layers):
        block = f"blocks.{number}"
        normed = [_norm(config, weights, f"{block}.norm1", x) for x in stream]
        if config.token_shift == "blocks":
            normed = _with_earlier(normed, [weights[f"{block}.shift1.share"]])
        stream = [x + a for x, a in zip(stream, _attention(config, weights, block, normed), strict=True)]
        normed = [_norm(config, weights, f"{block}.norm2", x) for x in stream]
        if config.token_shift == "blocks":
            normed = _with_earlier(normed, [weights[f"{block}.shift2.share"]])
        stream = [x + _mlp(config, weights, block, y) for x, y in zip(stream, normed, strict=True)]
    head = weights["tokens.weight"] if config.tied else weights["head.weight"]
    return torch.stack([head @ _norm(config, weights, "norm", x) for x in stream])


def _with_earlier(inputs: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """Add to each position factors[i] times the position i + 1 before it, if there is one."""
    results = []
    for position, x in enumerate(inputs):
        earlier = inputs[:position][::-1]
        results.append(sum((factor * y for factor, y in zip(factors, earlier, strict=False)), x))
    return results


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    result = weights[f"{name}.weight"] @ x
    return result + weights[f"{name}.bias"] if f"{name}.bias" in weights else result


def _norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm == "rmsnorm":
        return x / (x.square().mean() + config.norm_eps).sqrt() * weights[f"{name}.weight"]
    centred = x - x.mean()
    result = centred / (centred.square().mean() + config.norm_eps).sqrt() * weights[f"{name}.weight"]
    return result + weights[f"{name}.bias"] if f"{name}.bias" in weights else result


def _attention(config: ModelConfig, weights: Weights, block: str, inputs: list[Tensor]) -> list[Tensor]:
    projected = _projected(config, weights, f"{block}.attention", inputs)
    heads = []
    for head in range(config.n_heads):
        shared = head * config.n_kv_heads // config.n_heads
        part, kv_part = (slice(each * config.head_size, (each + 1) * config.head_size) for each in (head, shared))
        q_norm, k_norm = f"{block}.attention.q_norm", f"{block}.attention.k_norm"
        queries = [_head(config, weights, q_norm, q[part], place) for place, (q, _, _) in enumerate(projected)]
        keys = [_head(config, weights, k_norm, k[kv_part], place) for place, (_, k, _) in enumerate(projected)]
        values = [v[kv_part] for _, _, v in projected]
        heads.append([_look_back(queries[i], keys[: i + 1], values[: i + 1]) for i in range(len(inputs))])
    return [_linear(weights, f"{block}.attention.out", torch.cat(parts)) for parts in zip(*heads, strict=True)]


def _projected(config: ModelConfig, weights: Weights, name: str, inputs: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the query, key and value of each position, each with all its heads."""
    if config.n_kv_heads == config.n_heads:
        fused = [_linear(weights, f"{name}.qkv", x) for x in inputs]
        taps = [weights[f"{name}.convolution.taps.{number}"] for number in range(config.convolution - 1)]
        return [x.split(config.d_model) for x in _with_earlier(fused, taps)]
    width = config.n_kv_heads * config.head_size
    return [(_linear(weights, f"{name}.q", x), *_linear(weights, f"{name}.kv", x).split(width)) for x in inputs]


def _head(config: ModelConfig, weights: Weights, norm: str, x: Tensor, position: int) -> Tensor:
    if config.qk_norm:
        x = x / (x.square().mean() + config.norm_eps).sqrt() * weights[f"{norm}.weight"]
    return _turned(config, x, position)


def _look_back(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    scores = torch.stack([query @ key / math.sqrt(len(query)) for key in keys])
    weights = scores.exp() / scores.exp().sum()
    return sum((weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros_like(query))


def _turned(config: ModelConfig, x: Tensor, position: int) -> Tensor:
    """Rotate each pair (element i, element i + half) of a head by its own angle."""
    if config.positions != "rotary":
        return x
    half = len(x) // 2
    first, second = [], []
    for i in range(half):
        angle = position * _frequency(config, i, len(x))
        first.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
        second.append(x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(first + second)


def _frequency(config: ModelConfig, i: int, size: int) -> float:
    """Return the angle between two positions, as LLaMA 3 states it: by wavelengths."""
    frequency, scaling = config.rope_base ** (-2 * i / size), config.rope_scaling
    if scaling.kind is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    length, wavelength = scaling.original_context_length, 2 * math.pi / frequency
    if wavelength < length / scaling.high_frequency_factor:
        return frequency
    if wavelength > length / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = length / wavelength - scaling.low_frequency_factor
    smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _mlp(config: ModelConfig, weights: Weights, block: str, x: Tensor) -> Tensor:
    up = _linear(weights, f"{block}.mlp.up", x)
    if config.activation == "gelu":
        hidden = _gelu(up)
    elif config.activation == "gelu_tanh":
        hidden = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    elif config.activation == "relu2":
        hidden = up.clamp(min=0) ** 2
    else:
        gate = _linear(weights, f"{block}.mlp.gate", x)
        hidden = (gate * torch.sigmoid(gate) if config.activation == "swiglu" else _gelu(gate)) * up
    return _linear(weights, f"{block}.mlp.down", hidden)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
