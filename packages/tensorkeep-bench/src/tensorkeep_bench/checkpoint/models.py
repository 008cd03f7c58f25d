"""Models to measure: the tensors of a known model by name and shape, with random weights."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tensorkeep.errors import UsageError

# Random weights cost the time and the space of trained ones: a codec sees the same narrow range of exponents, and
# mantissas that are noise.
STANDARD_DEVIATION = 0.02
_MODEL = "openllama-3b"
DEFAULT_DTYPE = "bfloat16"
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # bytes of an element

_MULTIPLE = 64
_LARGEST_SCALE = 16.0
_MOST_LAYERS = 1000
_CHUNK = 1 << 22
_GRADIENT = 1e-3
_LEARNING_RATE = 1e-4
_KNOWN = (
    "a spec is openllama-3b, then any of :first-N, :layers=N, :scale=S and a dtype "
    f"({', '.join(DTYPES)}), for example openllama-3b:scale=0.1:float16"
)


@dataclass(frozen=True, slots=True)
class Llama:
    """The dimensions of a LLaMA with an untied head."""

    vocabulary: int
    width: int
    mlp: int
    layers: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        # Named and ordered as in Hugging Face's LLaMA, so that ``first-N`` takes the same parameters.
        attention = {f"self_attn.{name}_proj": (self.width, self.width) for name in "qkvo"}
        mlp = {f"mlp.{name}_proj": (self.mlp, self.width) for name in ("gate", "up")}
        norms = {f"{name}_layernorm": (self.width,) for name in ("input", "post_attention")}
        block = {**attention, **mlp, "mlp.down_proj": (self.width, self.mlp), **norms}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
        return shapes | {"model.norm.weight": (self.width,), "lm_head.weight": (self.vocabulary, self.width)}

    def scaled(self, scale: float) -> "Llama":
        """Return a model of the same depth with about ``scale`` times the weights."""
        # Every matrix has two sizes among width, MLP and vocabulary, so each size gets the square root.
        factor = math.sqrt(scale)
        vocabulary, width, mlp = (
            max(1, round(size * factor / _MULTIPLE)) * _MULTIPLE for size in (self.vocabulary, self.width, self.mlp)
        )
        return replace(self, vocabulary=vocabulary, width=width, mlp=mlp)


OPENLLAMA_3B = Llama(vocabulary=32_000, width=3_200, mlp=8_640, layers=26)  # 237 parameters, 3,426,473,600 weights


class Spec(NamedTuple):
    shapes: dict[str, tuple[int, ...]]
    dtype: str

    @property
    def weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        return self.weights * DTYPES[self.dtype]


def parse(text: str) -> Spec:
    """Parse a spec such as ``openllama-3b:first-100:float16``.

    Raises UsageError if the model or an option is unknown, or an option is given twice or is out of range.

    Examples
    --------
    >>> parse("openllama-3b:first-100:float16").nbytes
    2930828800
    """
    name, *options = text.split(":")
    if name != _MODEL:
        raise UsageError(f"{name!r} is not a known model", remedy=_KNOWN)
    model, first, dtype = OPENLLAMA_3B, None, DEFAULT_DTYPE
    given: set[str] = set()
    for option in options:
        # An option that is given twice has no clear meaning, so its key is remembered.
        key = "dtype" if option in DTYPES else re.split(r"[-=]", option)[0]
        if key in given:
            raise UsageError(f"{text!r} gives {key} twice", remedy=_KNOWN)
        given.add(key)
        if key == "dtype":
            dtype = option
        elif key == "scale":
            model = model.scaled(_number(option, r"scale=(\d+(?:\.\d+)?)", _LARGEST_SCALE))
        elif key == "layers":
            model = replace(model, layers=int(_number(option, r"layers=(\d+)", _MOST_LAYERS)))
        elif key == "first":
            first = int(_number(option, r"first-(\d+)", math.inf))
        else:
            raise UsageError(f"{option!r} is not an option of a model", remedy=_KNOWN)
    shapes = list(model.shapes().items())
    if first is not None and first > len(shapes):
        raise UsageError(f"{text!r} asks for {first} parameters of a model of {len(shapes)}", remedy=_KNOWN)
    return Spec(dict(shapes[:first]), dtype)


def _number(option: str, pattern: str, most: float) -> float:
    # ASCII: \d would match digits of every script.
    found = re.fullmatch(pattern, option, re.ASCII)
    number = float(found.group(1)) if found else 0.0
    if not 0 < number <= most:
        raise UsageError(f"{option!r} is out of range: it takes a number above 0, at most {most:g}", remedy=_KNOWN)
    return number


def spec_of_size(nbytes: int) -> str:
    """Return the spec of a model of about ``nbytes`` bytes: with fewer layers, or scaled down if one is too large."""
    whole, one = parse(_MODEL), parse(f"{_MODEL}:layers=1")
    layer = (whole.nbytes - one.nbytes) / (OPENLLAMA_3B.layers - 1)
    layers = round((nbytes - one.nbytes) / layer) + 1
    size = f"layers={layers}" if layers >= 1 else f"scale={nbytes / whole.nbytes:.4f}"
    return f"{_MODEL}:{size}:{DEFAULT_DTYPE}"


def build(spec: str, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of a spec, on the CPU: weights drawn N(0, 0.02), norms 1; UsageError if not valid."""
    parsed = parse(spec)
    dtype = getattr(torch, parsed.dtype)

    def fill(place: int, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        # The values depend only on seed, position and shape, so the weights of ``first-100`` are the first hundred of
        # the full model.
        return _normal(shape, dtype, torch.Generator().manual_seed(seed * 1_000_003 + place))

    # torch draws on one thread; one generator per tensor lets all cores draw.
    with ThreadPoolExecutor() as threads:
        tensors = threads.map(fill, range(len(parsed.shapes)), parsed.shapes.values())
        return dict(zip(parsed.shapes, tensors, strict=True))


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1)
    # Chunk by chunk, because a float32 copy of the tensor would double the memory.
    chunk = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        part.copy_(chunk[: part.numel()].normal_(0.0, STANDARD_DEVIATION, generator=generator))
    return tensor


def add_adamw_state(tensors: dict[str, torch.Tensor], *, seed: int = 0) -> dict[str, Any]:
    """Return ``{"model": tensors, "optimizer": state_dict, "step": 1}`` after one AdamW step on the tensors."""
    # The moments have the dtype of the weights, as in torch's AdamW, and take twice their bytes.
    optimizer = torch.optim.AdamW(tensors.values(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        # One at a time, because all gradients would be as large as the weights. AdamW skips tensors without one.
        drawn = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, _GRADIENT, generator=generator)
        tensor.grad = drawn.to(tensor.dtype)
        optimizer.step()
        tensor.grad = None
    return {"model": tensors, "optimizer": optimizer.state_dict(), "step": 1}
