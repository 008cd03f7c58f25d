"""How far the layers of a model moved from step to step of a run, measured on a sample of the weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorkeep.checkpoint.diff import Tolerance, distances, layer_of
from tensorkeep.checkpoint.options import AllowOption, MemorySize, open_settings, thread_count
from tensorkeep.errors import TensorkeepError
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.finding import open_reader
from tensorkeep.pages.elements import ReportTable, TableEntry
from tensorkeep.pages.page import HeatMap, heat_map
from tensorkeep.pages.statistics import read_ranges
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.direct_io import Bytes
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.units import counted, format_bytes

_MOST_LAYERS = 64
_MOST_STEPS = 32
_FEWEST_STEPS = 4
_RANGE_BYTES = 1024**2

# Bytes to decode for each byte of the sample: a whole block is decoded to compare one part.
_DECODED = 8


@dataclass(frozen=True, slots=True)
class Motion:
    """How far layers moved.

    ``moved`` has, for each layer, the relative L2 difference of its sample between successive steps that were
    read; ``problems`` has the steps that could not be read.
    """

    steps: list[int]
    layers: list[str]
    moved: list[list[float | None]]
    text: str
    problems: dict[int, str] = field(default_factory=dict)

    def sentence(self) -> str:
        furthest = [(max(_finite(row), default=0.0), layer) for row, layer in zip(self.moved, self.layers, strict=True)]
        largest, layer = max(furthest)
        still = sum(1 for moved, _ in furthest if not moved)
        frozen = f" {counted(still, 'layer')} did not move." if still else ""
        if not largest:
            return "No layer moved between the steps that were read."
        return f"Largest move of a layer between two steps: {layer}, relative L2 {largest:.3g}.{frozen}"

    def moved_most(self, step: int) -> str | None:
        """Return the layer that moved most to a step, in words; None for the first step and steps not read."""
        if step not in self.steps[1:]:
            return None
        # The column of a step is the move from the step before it.
        place = self.steps.index(step) - 1
        moved = [(row[place] or 0.0, layer) for row, layer in zip(self.moved, self.layers, strict=True)]
        largest, layer = max(moved)
        return f"{layer} ({largest:.3g})" if largest else None

    def heat_map(self) -> HeatMap:
        def text(row: int, column: int, value: float) -> str:
            steps = f"step {self.steps[column]} to {self.steps[column + 1]}"
            return f"{self.layers[row]}, {steps}: relative L2 {value:.3g}"

        return heat_map(self.layers, [str(step) for step in self.steps[1:]], self.moved, text, log=True)

    def table(self) -> ReportTable:
        """Return the moves in figures, for readers who do not see the colours."""
        rows = []
        for layer, row in zip(self.layers, self.moved, strict=True):
            moved = _finite(row)
            total = math.fsum(moved)
            figures = (moved[0], moved[-1], max(moved)) if moved else (None, None, None)
            rows.append((TableEntry(layer), *(_figure(value) for value in (*figures, total))))
        headings = ("layer", ">first move", ">last move", ">largest move", ">sum of moves")
        return ReportTable(
            "Moves of the layers", headings, rows, "Relative L2 differences between the steps that were read."
        )


def _finite(row: Sequence[float | None]) -> list[float]:
    return [value for value in row if value is not None and math.isfinite(value)]


def _figure(value: float | None) -> TableEntry:
    return TableEntry("-") if value is None else TableEntry(f"{value:.3g}", value)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and the range of its largest tensor that is compared."""

    name: str
    leaf: StoredLeaf
    start: int
    stop: int


# The bytes of the ranges, by the name of the tensor.
_Sample = dict[str, Bytes]


def read_motion(
    steps: Mapping[int, Path],
    *,
    sample: int,
    allow: AllowOption,
    threads: int | None,
    memory_budget: MemorySize,
    progress: Progress | None,
) -> Motion | None:
    """Return how far layers moved between steps; None with fewer than two steps, or without weights.

    The steps are evenly spread, as many as ``sample`` allows.
    """
    if len(steps) < 2:
        return None
    settings = open_settings(memory_budget, allow=allow)
    count = thread_count(threads)
    problems: dict[int, str] = {}
    with settings.pool as pool:
        # By the last step: layers that were frozen or added later are in it.
        layers, total, cost = _layers_of_last(steps, settings, problems)
        if not layers:
            return None
        chosen = _spread(sorted(steps), max(_FEWEST_STEPS, min(_MOST_STEPS, _DECODED * sample // cost)))
        meter = Meter(sum(layer.stop - layer.start for layer in layers) * len(chosen), progress)
        columns: list[list[float | None]] = []
        read: list[int] = []
        before: _Sample = {}
        for number in chosen:
            try:
                with open_reader(steps[number], settings) as reader:
                    now = _read(reader, layers, pool, count, meter)
            except TensorkeepError as error:
                problems[number] = str(error).splitlines()[0]
                continue
            if read:
                columns.append([_distance(layer, before, now) for layer in layers])
            # Only two samples are held. A step that cannot be read is skipped, and the next one is compared with this
            # one.
            before = now
            read.append(number)
    moved = [list(row) for row in zip(*columns, strict=True)] or [[] for _ in layers]
    return Motion(read, [layer.name for layer in layers], moved, _text(layers, total, len(read), len(steps)), problems)


def _layers_of_last(
    steps: Mapping[int, Path], settings: OpenSettings, problems: dict[int, str]
) -> tuple[list[_Layer], int, int]:
    """Return the sampled layers of the last readable step, the number of all layers, and the bytes to decode a step."""
    for number in sorted(steps, reverse=True):
        try:
            with open_reader(steps[number], settings) as reader:
                layers, total = _layers(reader, settings.pool.budget)
                cost = sum(min(reader.block_bytes(layer.leaf.name), layer.leaf.nbytes) for layer in layers)
                return layers, total, cost
        except TensorkeepError as error:
            problems[number] = str(error).splitlines()[0]
    return [], 0, 0


def _layers(reader: Reader, budget: int) -> tuple[list[_Layer], int]:
    """Return the largest layers, in the order of the state, and the number of all layers."""
    by_layer: dict[str, StoredLeaf] = {}
    parts = {part for name, (part, _) in reader.flat.parts.items() if name in reader.flat.leaves}
    for name, leaf in reader.flat.leaves.items():
        part, _ = reader.flat.parts[name]
        # Optimizer states move as well, but say little about the model.
        is_weight = part == "model" if "model" in parts else "optim" not in part.lower()
        if is_weight and leaf.dtype.kind == "float" and leaf.nbytes:
            layer = layer_of(name)
            if layer not in by_layer or leaf.nbytes > by_layer[layer].nbytes:
                by_layer[layer] = leaf
    largest = set(sorted(by_layer, key=lambda layer: -by_layer[layer].nbytes)[:_MOST_LAYERS])
    # Two samples are in memory beside the buffers: the step before, and this step.
    limit = min(_RANGE_BYTES, budget // 4 // max(len(largest), 1))
    return [_layer(name, leaf, limit) for name, leaf in by_layer.items() if name in largest], len(by_layer)


def _layer(name: str, leaf: StoredLeaf, limit: int) -> _Layer:
    size = leaf.dtype.itemsize
    length = max(min(limit, leaf.nbytes) // size, 1) * size
    # From the middle: the first rows of an embedding are often special tokens.
    start = (leaf.nbytes - length) // 2 // size * size
    return _Layer(name, leaf, start, start + length)


def _spread(steps: list[int], count: int) -> list[int]:
    if len(steps) <= count:
        return steps
    # The first and the last step are always read.
    return [steps[place * (len(steps) - 1) // (count - 1)] for place in range(count)]


def _read(reader: Reader, layers: list[_Layer], pool: BufferPool, threads: int, meter: Meter) -> _Sample:
    leaves = reader.flat.leaves
    # A layer may have had another shape or dtype: its bytes cannot be compared.
    ranges = {
        layer.leaf.name: [(layer.start, layer.stop)]
        for layer in layers
        if (leaf := leaves.get(layer.leaf.name)) is not None
        and (leaf.shape, leaf.dtype) == (layer.leaf.shape, layer.leaf.dtype)
    }
    found: _Sample = {}

    def use(name: str, data: Bytes) -> None:
        # The buffer goes back to the pool.
        found[name] = data.copy()
        meter.add(len(data))

    read_ranges(reader, ranges, use, threads=threads, pool=pool)
    return found


def _distance(layer: _Layer, before: _Sample, now: _Sample) -> float | None:
    """Return the relative L2 difference of a layer's sample; None if a step does not have the layer."""
    one, other = before.get(layer.leaf.name), now.get(layer.leaf.name)
    if one is None or other is None:
        return None
    dtype = layer.leaf.dtype
    # Without a tolerance: any change of bits is a move.
    found = distances(one, other, (dtype, dtype), Tolerance(0, 0))
    if found is None or not found.difference:
        return 0.0
    # A move away from zeros has no relative size.
    return math.sqrt(found.difference / found.first) if found.first else math.inf


def _text(layers: list[_Layer], total: int, read: int, steps: int) -> str:
    most = format_bytes(max(layer.stop - layer.start for layer in layers))
    which = f"{len(layers)} of {total:,} layers" if len(layers) < total else counted(total, "layer")
    those = f"{read} of {counted(steps, 'step')}" if read < steps else f"all {counted(steps, 'step')}"
    return f"A sample: {those}, {which}, and for a layer up to {most} from the middle of its largest tensor."
