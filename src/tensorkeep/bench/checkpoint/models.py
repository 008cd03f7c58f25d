"""Models to measure with: the tensors of a known model, by their names and shapes, filled with random weights.

A *spec* names a model and what is changed of it: ``openllama-3b``, ``openllama-3b:first-100``,
``openllama-3b:scale=0.1:float16``. Random weights take the time and the space that trained ones take: a codec sees the
same narrow range of exponents, and mantissas that are noise.
"""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tensorkeep.errors import UsageError

if TYPE_CHECKING:
    import torch

STANDARD_DEVIATION = 0.02
DEFAULT_DTYPE = "bfloat16"
DTYPES = ("bfloat16", "float16", "float32", "float64")

_MULTIPLE = 64
_LARGEST_SCALE = 16.0
_MOST_LAYERS = 1000
_CHUNK = 1 << 22
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
        """Return the shape of each parameter, named and ordered as in Hugging Face's LLaMA."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in self._layer().items()}
        return shapes | {"model.norm.weight": (self.width,), "lm_head.weight": (self.vocabulary, self.width)}

    def _layer(self) -> dict[str, tuple[int, ...]]:
        square, up, down = (self.width, self.width), (self.mlp, self.width), (self.width, self.mlp)
        return {
            **{f"self_attn.{name}_proj": square for name in "qkvo"},
            "mlp.gate_proj": up,
            "mlp.up_proj": up,
            "mlp.down_proj": down,
            "input_layernorm": (self.width,),
            "post_attention_layernorm": (self.width,),
        }

    def scaled(self, scale: float) -> Llama:
        """Return a model of the same depth with about ``scale`` times the weights.

        Every matrix is a product of two of width, MLP and vocabulary, so each of these is multiplied by the square
        root of the scale and rounded to the nearest multiple of 64, at least 64.
        """
        factor = math.sqrt(scale)
        vocabulary, width, mlp = (
            max(1, round(size * factor / _MULTIPLE)) * _MULTIPLE for size in (self.vocabulary, self.width, self.mlp)
        )
        return replace(self, vocabulary=vocabulary, width=width, mlp=mlp)


OPENLLAMA_3B = Llama(vocabulary=32_000, width=3_200, mlp=8_640, layers=26)
"""237 parameters, 3,426,473,600 weights."""

MODELS = {"openllama-3b": OPENLLAMA_3B}


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec.

    Attributes
    ----------
    model : str
    shapes : dict of str to tuple of int
        The parameters, in order.
    dtype : str
    """

    model: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str

    @property
    def weights(self) -> int:
        """How many weights there are."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return self.weights * {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[self.dtype]


def parse(text: str) -> Spec:
    """Return what a spec such as ``openllama-3b:first-100:float16`` means.

    Raises
    ------
    UsageError
        If it names no known model, or an option that there is not, twice, or out of range.
    """
    name, *options = text.split(":")
    if name not in MODELS:
        raise UsageError(f"{name!r} is no known model", remedy=_KNOWN)
    model, first, dtype = MODELS[name], None, DEFAULT_DTYPE
    seen: set[str] = set()
    for option in options:
        key = "dtype" if option in DTYPES else re.split(r"[-=]", option)[0]
        if key in seen:
            raise UsageError(f"{text!r} gives {key} twice", remedy=_KNOWN)
        seen.add(key)
        if key == "dtype":
            dtype = option
        elif key == "scale":
            model = model.scaled(_number(option, r"scale=(\d+(?:\.\d+)?)", _LARGEST_SCALE))
        elif key == "layers":
            model = replace(model, layers=int(_number(option, r"layers=(\d+)", _MOST_LAYERS)))
        elif key == "first":
            first = int(_number(option, r"first-(\d+)", math.inf))
        else:
            raise UsageError(f"{option!r} is no option of a model", remedy=_KNOWN)
    shapes = list(model.shapes().items())
    if first is not None and first > len(shapes):
        raise UsageError(f"{text!r} asks for {first} parameters of a model of {len(shapes)}", remedy=_KNOWN)
    return Spec(name, dict(shapes[:first]), dtype)


def _number(option: str, pattern: str, most: float) -> float:
    found = re.fullmatch(pattern, option, re.ASCII)
    number = float(found.group(1)) if found else 0.0
    if not 0 < number <= most:
        raise UsageError(f"{option!r} is out of range: it takes a number above 0, at most {most:g}", remedy=_KNOWN)
    return number


def spec_of_size(nbytes: int, model: str = "openllama-3b", dtype: str = DEFAULT_DTYPE) -> str:
    """Return the spec of about that many bytes: the model with fewer layers, or scaled down if one layer is too much.

    Fewer layers keep the tensors as large as they are; scaling makes them small.
    """
    whole, one = parse(f"{model}:{dtype}"), parse(f"{model}:layers=1:{dtype}")
    layer = (whole.nbytes - one.nbytes) / (MODELS[model].layers - 1)
    layers = round((nbytes - one.nbytes) / layer) + 1
    return f"{model}:layers={layers}:{dtype}" if layers >= 1 else f"{model}:scale={nbytes / whole.nbytes:.4f}:{dtype}"


def build(spec: str, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of a spec: weights drawn N(0, 0.02), norms 1.

    A tensor's values depend on the seed, its place and its shape only, so ``first-100`` is the same weights as the
    first hundred of the whole model.

    Parameters
    ----------
    spec : str
        See `parse`.
    seed : int
        Of the random weights.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU, in the model's order.

    Raises
    ------
    UsageError
        If the spec is wrong.
    """
    import torch

    parsed = parse(spec)
    dtype = getattr(torch, parsed.dtype)

    def fill(place: int, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        return _normal(shape, dtype, torch.Generator().manual_seed(seed * 1_000_003 + place))

    # torch draws on one thread; each tensor has a generator of its own, so that all cores can draw.
    with ThreadPoolExecutor() as threads:
        tensors = threads.map(fill, range(len(parsed.shapes)), parsed.shapes.values())
        return dict(zip(parsed.shapes, tensors, strict=True))


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw in float32, chunk by chunk: a whole float32 copy would double the memory."""
    import torch

    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1)
    chunk = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        part.copy_(chunk[: part.numel()].normal_(0.0, STANDARD_DEVIATION, generator=generator))
    return tensor
