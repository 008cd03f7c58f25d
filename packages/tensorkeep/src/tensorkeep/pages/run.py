"""The page of a run: its figures, the sizes and shared bytes of its steps, how its layers moved; two runs compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.diff import Tolerance, distances, layer_of
from tensorkeep.checkpoint.log import LoggedStep, RunLog, lines_of
from tensorkeep.checkpoint.log import log as read_log
from tensorkeep.checkpoint.options import AllowOption, MemorySize, open_settings, thread_count
from tensorkeep.errors import PathLike, TensorkeepError
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.finding import open_reader
from tensorkeep.formats.native.directory import summarise
from tensorkeep.pages.curves import Chart, Curve, chart
from tensorkeep.pages.elements import ReportTable, TableEntry
from tensorkeep.pages.page import Column, Findings, HeatMap, PageSubject, drawn_table, heat_map, show_page, title_of
from tensorkeep.pages.statistics import read_ranges
from tensorkeep.paths import as_path
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import first_bytes
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.units import counted, format_bytes, format_moment, format_seconds

_LOG = "log.jsonl"
_LONGEST_LOG = 256 * 1024**2
# Steps and the values there.
Points = list[tuple[int, float]]

_CHARTS = (
    ("Loss", (("train/loss", "training"), ("evaluate/validation_loss", "validation"))),
    ("Learning rate", (("train/learning_rate", "learning rate"),)),
    ("Tokens per second", (("train/tokens_per_second", "tokens per second"),)),
    ("Gradient norm", (("train/gradient_norm", "gradient norm"),)),
    ("MFU", (("train/mfu", "MFU"),)),
    ("Peak memory (GB)", (("train/peak_memory_bytes", "peak memory"),)),
)
_COLOURS = ("good", "bad")
_RANGE = (">first", ">last", ">smallest", ">largest")
_MOST_BARS = 120
# The width of the chart, and the most of a bar: the number of a step is below its bar.
_SIZES_WIDTH, _WIDEST_BAR = 900, 56
_MOST_SHARED = 40
_NAMED = 3

_STEPS = (
    Column("step", "name"),
    Column("saved", "text", "UTC"),
    Column("size", "bytes", "bytes of its files"),
    Column("new", "bytes", "bytes that no earlier step has"),
    Column("shared", "percent", "fraction of its bytes that earlier steps wrote"),
    Column("state", "bytes", "raw bytes of its tensors"),
    Column("ratio", "ratio", "raw bytes for each byte of its files"),
    Column("moved most", "text", "the layer that moved most since the last step that was read"),
    Column("problem", "text"),
)


# How far the layers moved from step to step, measured on a sample of the weights.

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


def _read_motion(
    steps: Mapping[int, Path], settings: OpenSettings, sample: int, threads: int, progress: Progress | None
) -> Motion | None:
    """Return how far layers moved between evenly spread steps; None with fewer than two steps, or without weights."""
    if len(steps) < 2:
        return None
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
                    now = _read_layers(reader, layers, pool, threads, meter)
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
    return Motion(
        read, [layer.name for layer in layers], moved, _sample_text(layers, total, len(read), len(steps)), problems
    )


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


def _read_layers(reader: Reader, layers: list[_Layer], pool: BufferPool, threads: int, meter: Meter) -> _Sample:
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


def _sample_text(layers: list[_Layer], total: int, read: int, steps: int) -> str:
    most = format_bytes(max(layer.stop - layer.start for layer in layers))
    which = f"{len(layers)} of {total:,} layers" if len(layers) < total else counted(total, "layer")
    those = f"{read} of {counted(steps, 'step')}" if read < steps else f"all {counted(steps, 'step')}"
    return f"A sample: {those}, {which}, and for a layer up to {most} from the middle of its largest tensor."


# The run.


@dataclass(frozen=True, slots=True)
class RunContents(PageSubject):
    """A run.

    ``figures`` has the numbers in its ``log.jsonl`` by kind and name, such as ``"train/loss"``; ``origins`` has,
    for each complete step, the bytes of its files by the step that wrote them. ``motion`` is None with fewer than two
    steps, or without weights. ``cut`` means that the log is too long, and its end was not read.
    """

    log: RunLog
    figures: dict[str, Points]
    origins: dict[int, dict[int, int]] = field(default_factory=dict)
    motion: Motion | None = None
    cut: bool = False
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def moves(self) -> Motion | None:
        # One readable step has no move to show.
        return self.motion if self.motion is not None and len(self.motion.steps) > 1 else None

    @property
    def heading(self) -> str:
        return self.log.path

    def findings(self) -> Findings:
        log = self.log
        size, new = (sum(getattr(step, name) for step in log.steps) for name in ("nbytes", "new_bytes"))
        first, last = log.steps[0].number, log.steps[-1].number
        shared = f"; files that steps share save {format_bytes(size - new)}" if size > new else ""
        steps = f"{counted(len(log.steps), 'step')}, {first} to {last}" if last > first else f"1 step, {first}"
        found = [("", f"{steps}: {format_bytes(new)} on the disk{shared}.")]
        times = [step.saved_at for step in log.saved if step.saved_at is not None]
        if len(times) > 1:
            first_time, last_time = min(times), max(times)
            length = format_seconds(last_time - first_time)
            found.append(
                ("", f"Saved from {format_moment(first_time)} to {format_moment(last_time)}, within {length}.")
            )
        if log.best and log.best.metrics and log.metric:
            found.append(("good", f"Best step: {log.best.number}, {log.metric} {log.best.metrics[log.metric]:.5g}."))
        found += [("", line) for line in _deleted(log)]
        found += [("bad", line) for line in _divergence(self.figures)]
        for number, problem in list(self.problems.items())[:_NAMED]:
            found.append(("bad", f"Step {number}: {problem}."))
        if len(self.problems) > _NAMED:
            found.append(("bad", f"{len(self.problems) - _NAMED:,} more steps have problems; see the table."))
        if self.moves is not None:
            found.append(("", self.moves.sentence()))
        return found

    def summary(self) -> ReportTable:
        rows = [
            (TableEntry(f"{each.title}: {curve.name}" if len(each.curves) > 1 else each.title), *_range(curve))
            for each in self.charts()
            for curve in each.curves
        ]
        return ReportTable("Figures", ("figure", *_RANGE), rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": "run",
            **self.log.as_dict(),
            "figures": {name: [list(point) for point in points] for name, points in self.figures.items()},
            "origins": {step: dict(found) for step, found in self.origins.items()},
            "motion": None if self.motion is None else asdict(self.motion),
            "problems": self.problems,
        }

    def page(self) -> str:
        log, moves = self.log, self.moves
        table = drawn_table(_STEPS, map(self._row, reversed(log.steps)), noun="step")
        return show_page(
            "run.html.j2",
            title_of(log.path),
            table,
            path=log.path,
            findings=self.findings(),
            charts=self.charts(),
            cut=self.cut,
            sizes=_sizes(log.steps),
            shared=_shared(self.origins),
            motion=None if moves is None else moves.heat_map(),
            motion_text="" if moves is None else moves.text,
            motion_table=None if moves is None else moves.table(),
            left_out=table.left_out_text("the latest"),
        )

    def charts(self) -> list[Chart]:
        """Return charts of the figures in the log, and of metrics of steps that the log does not have."""
        found = [
            chart(title, [Curve(*each) for each in zip(curves, _COLOURS, curves.values(), strict=False)])
            for title, curves in self.plots().items()
        ]
        return [each for each in found if each is not None]

    def plots(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Return the points of each curve, by the title of its chart and its name."""
        figures = dict(self.figures)
        # A metric that the log has as well is drawn once.
        known = {name.rpartition("/")[2] for name in figures}
        metrics = {name: points for name, points in self.log.curves().items() if name not in known}
        if "train/peak_memory_bytes" in figures:
            points = figures["train/peak_memory_bytes"]
            figures["train/peak_memory_bytes"] = [(step, value / 1e9) for step, value in points]
        charts = {
            title: {label: figures[name] for name, label in names if name in figures} for title, names in _CHARTS
        } | {name: {"metric of the step": points} for name, points in metrics.items()}
        return {
            title: {label: [(float(step), value) for step, value in points] for label, points in curves.items()}
            for title, curves in charts.items()
            if curves
        }

    def _row(self, step: LoggedStep) -> list[Any]:
        shared = 1 - step.new_bytes / step.nbytes if step.nbytes else None
        ratio = step.state_bytes / step.nbytes if step.state_bytes and step.nbytes else None
        saved = None if step.saved_at is None else format_moment(step.saved_at)
        name = f"{step.number}{' (best)' if step.best else ''}"
        state = step.state_bytes or None
        moved = None if self.moves is None else self.moves.moved_most(step.number)
        return [name, saved, step.nbytes, step.new_bytes, shared, state, ratio, moved, self.problems.get(step.number)]


def _range(curve: Curve) -> tuple[TableEntry, ...]:
    values = [value for _, value in curve.points]
    return tuple(TableEntry(f"{value:.5g}", value) for value in (values[0], values[-1], min(values), max(values)))


@dataclass(frozen=True, slots=True)
class RunComparison(PageSubject):
    """Two runs: their figures in the same charts."""

    runs: tuple[RunContents, RunContents]

    @property
    def names(self) -> tuple[str, str]:
        first, second = (title_of(run.log.path) for run in self.runs)
        # Runs of one name are distinguished by their folders.
        return (first, second) if first != second else (self.runs[0].log.path, self.runs[1].log.path)

    @property
    def heading(self) -> str:
        return " and ".join(run.log.path for run in self.runs)

    def findings(self) -> Findings:
        found: Findings = []
        for name, run in zip(self.names, self.runs, strict=True):
            numbers = [step.number for step in run.log.saved]
            deleted = f", {len(run.log.pruned):,} of them deleted" if run.log.pruned else ""
            steps = f"{counted(len(numbers), 'saved step')}, {numbers[0]} to {numbers[-1]}"
            found.append(("", f"{name}: {steps}{deleted}."))
            found += [("bad", f"{name}: {line}") for line in _divergence(run.figures)]
        return found + self._better()

    def _better(self) -> Findings:
        logs = [run.log for run in self.runs]
        metric, mode = logs[0].metric, logs[0].mode
        best = [point for log in logs if (point := best_of(log)) is not None]
        if (metric, mode) != (logs[1].metric, logs[1].mode) or len(best) < 2:
            return []
        texts = [f"{value:.5g} at step {step}" for step, value in best]
        if best[0][1] == best[1][1]:
            return [("", f"Both runs have the same best {metric}: {texts[0]}, and {texts[1]}.")]
        better = int((best[1][1] < best[0][1]) == (mode == "min"))
        return [
            ("good", f"{self.names[better]} has the better {metric}: {texts[better]}, against {texts[1 - better]}.")
        ]

    def summary(self) -> ReportTable:
        rows = [
            (TableEntry(each.title), TableEntry(curve.name), *_range(curve))
            for each in self.charts()
            for curve in each.curves
        ]
        return ReportTable("Figures", ("figure", "run", *_RANGE), rows)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "runs", "runs": [run.as_dict() for run in self.runs]}

    def charts(self) -> list[Chart]:
        """Return a chart for each figure of the runs, with a curve of each run that has it."""
        plots = [run.plots() for run in self.runs]
        figures = dict.fromkeys(
            (title, label) for found in plots for title, curves in found.items() for label in curves
        )
        charts = []
        for title, label in figures:
            curves = [
                Curve(name, colour, found[title][label])
                for name, colour, found in zip(self.names, _COLOURS, plots, strict=True)
                if label in found.get(title, {})
            ]
            several = any(len(found.get(title, {})) > 1 for found in plots)
            # A chart of one curve has no legend.
            only = f" ({curves[0].name} only)" if len(curves) == 1 else ""
            charts.append(chart((f"{title}: {label}" if several else title) + only, curves))
        return [each for each in charts if each is not None]

    def page(self) -> str:
        return show_page(
            "runs.html.j2",
            " and ".join(self.names),
            None,
            runs=[(name, run.log.path) for name, run in zip(self.names, self.runs, strict=True)],
            findings=self.findings(),
            charts=self.charts(),
            cut=any(run.cut for run in self.runs),
            figures=self.summary(),
        )


def read_run(
    path: PathLike,
    *,
    sample: int,
    allow: AllowOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    progress: Progress | None = None,
) -> RunContents:
    """Read the log and the manifests of a run, and a sample of its weights. Damaged steps become ``problems``.

    Raises the errors of `tensorkeep.log`.
    """
    run = read_figures(path)
    problems = {step.number: step.problem for step in run.log.steps if step.problem}
    complete = {step.number: as_path(step.path) for step in run.log.steps if step.problem is None}
    # A damaged step must not end the whole page.
    settings = open_settings(memory_budget, allow=allow)
    motion = _read_motion(complete, settings, sample, thread_count(threads), progress)
    return replace(
        run,
        origins=dict(_origins(complete)),
        motion=motion,
        problems=problems | (motion.problems if motion else {}),
    )


def read_figures(path: PathLike) -> RunContents:
    """Read the log and the manifests of a run, and no weights. Raises the errors of `tensorkeep.log`."""
    found = read_log(path)
    content = _log_content(as_path(found.path))
    return RunContents(found, figures_of(content), cut=len(content) >= _LONGEST_LOG)


def _log_content(root: Path) -> bytes:
    # The log is in the folder of the run, the steps may be in a subfolder.
    for place in (root, root.parent):
        if content := first_bytes(place / _LOG, _LONGEST_LOG):
            return content
    return b""


def figures_of(content: bytes) -> dict[str, Points]:
    """Return the numbers in the lines of a log, by kind and name."""
    if not content:
        return {}
    # By step: a step that was repeated after a kill has its last value.
    found: dict[str, dict[int, float]] = {}
    for line in lines_of(content):
        kind = line.get("kind")
        for name, value in line.items():
            if name not in ("step", "kind") and isinstance(value, int | float | None) and not isinstance(value, bool):
                # The log has null for a number that is not finite.
                found.setdefault(f"{kind}/{name}", {})[line["step"]] = math.nan if value is None else value
    return {name: sorted(points.items()) for name, points in found.items()}


def _origins(steps: Mapping[int, Path]) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield each step with the bytes of its files by the step that wrote them."""
    first: dict[tuple[int, int], int] = {}
    for number, path in steps.items():
        try:
            files = summarise(path).files
        except TensorkeepError:
            continue  # deleted meanwhile
        sizes: dict[int, int] = {}
        # A hard link has the inode of the file that it shares: the first step with the inode wrote the file.
        for status in files:
            writer = first.setdefault((status.st_dev, status.st_ino), number)
            sizes[writer] = sizes.get(writer, 0) + status.st_size
        yield number, sizes


def _deleted(log: RunLog) -> Iterator[str]:
    if not log.pruned:
        return
    yield f"The metrics of {counted(len(log.pruned), 'deleted step')} are in the figures as well."
    best = best_of(log)
    if best is not None and best[0] not in {step.number for step in log.steps}:
        yield f"The best {log.metric} of all was {best[1]:.5g}, at step {best[0]}, which was deleted."


def best_of(log: RunLog) -> tuple[int, float] | None:
    """Return the step with the best value of the log's metric, deleted or not, and the value; None without one."""
    points = [(step, value) for step, value in log.curves().get(log.metric or "", []) if not math.isnan(value)]
    sign = -1 if log.mode == "max" else 1
    return min(points, key=lambda point: (sign * point[1], -point[0]), default=None)


def _divergence(figures: dict[str, Points]) -> Iterator[str]:
    for name in ("loss", "gradient_norm"):
        bad = [step for step, value in figures.get(f"train/{name}", []) if not math.isfinite(value)]
        if bad:
            count = counted(len(bad), "logged step")
            yield f"The {name.replace('_', ' ')} was not finite at {count}, first at step {bad[0]}."


def _sizes(steps: Sequence[LoggedStep]) -> dict[str, Any]:
    shown = steps[-_MOST_BARS:]
    most = max((step.nbytes for step in shown), default=0) or 1
    # Few bars are not wider than the numbers below them.
    wide = min(_SIZES_WIDTH / len(shown), _WIDEST_BAR)
    every = math.ceil(_WIDEST_BAR / wide)
    bars = [
        {
            "x": place * wide + min(1.0, wide * 0.1),
            "width": wide - 2 * min(1.0, wide * 0.1),
            "new": step.new_bytes / most * 150,
            "shared": (step.nbytes - step.new_bytes) / most * 150,
            "title": f"step {step.number}: {format_bytes(step.nbytes)}, {format_bytes(step.new_bytes)} new",
            "middle": (place + 0.5) * wide,
            "label": str(step.number) if place % every == 0 and (place + 0.5) * wide < _SIZES_WIDTH - 15 else "",
        }
        for place, step in enumerate(shown)
    ]
    return {
        "bars": bars,
        "most": format_bytes(most),
        "sharing": any(step.new_bytes < step.nbytes for step in shown),
        "left": len(steps) - len(shown),
    }


def _shared(origins: dict[int, dict[int, int]]) -> HeatMap | None:
    """Return a map of steps and the earlier steps that wrote their bytes; None if no bytes are shared."""
    rows = list(origins)[-_MOST_SHARED:]
    sums: dict[int, int] = {}
    for step in rows:
        for origin, nbytes in origins[step].items():
            if origin != step:
                sums[origin] = sums.get(origin, 0) + nbytes
    if not sums:
        return None
    # The steps that wrote most bytes of others, in their order.
    columns = sorted(sorted(sums, key=lambda origin: -sums[origin])[:_MOST_SHARED])
    found = [[origins[step].get(origin, 0) * (origin != step) for origin in columns] for step in rows]
    own = [origins[step].get(step, 0) for step in rows]
    sizes = [sum(origins[step].values()) or 1 for step in rows]
    values: list[list[float | None]] = [
        [nbytes / size if nbytes else None for nbytes in (*earlier, new)]
        for earlier, new, size in zip(found, own, sizes, strict=True)
    ]

    def text(row: int, column: int, fraction: float) -> str:
        writer = "itself" if column == len(columns) else f"step {columns[column]}"
        return f"step {rows[row]}: {format_bytes(fraction * sizes[row])} ({fraction:.1%}) were written by {writer}"

    return heat_map([str(step) for step in rows], [*map(str, columns), "own"], values, text)
