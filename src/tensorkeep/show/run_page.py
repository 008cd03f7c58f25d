"""The page of a run: its figures, the sizes of its steps and the bytes that they share, and how its layers moved."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tensorkeep.checkpoint.log import LoggedStep
from tensorkeep.report.charts.curves import Chart, Curve, chart
from tensorkeep.report.tables import Entry, ReportTable
from tensorkeep.show.heat import HeatMap, heat_map
from tensorkeep.show.motion import Motion
from tensorkeep.show.page import Column, drawn_table, left_out_text, show_page, title_of
from tensorkeep.show.run import Points, RunContents
from tensorkeep.units import counted, format_bytes, format_moment, format_seconds

_CHARTS = (
    ("Loss", (("train/loss", "training"), ("evaluate/validation_loss", "validation"))),
    ("Learning rate", (("train/learning_rate", "learning rate"),)),
    ("Tokens per second", (("train/tokens_per_second", "tokens per second"),)),
    ("Gradient norm", (("train/gradient_norm", "gradient norm"),)),
    ("MFU", (("train/mfu", "MFU"),)),
    ("Peak memory (GB)", (("train/peak_memory_bytes", "peak memory"),)),
)
_COLOURS = ("good", "bad")
_MOST_BARS = 120
_SIZES_WIDTH, _WIDEST_BAR = 900, 56
"""The width of all bars, and the most of one, which the number of its step needs below it."""
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
    Column("moved most", "text", "the layer that moved most since the step that was read before"),
    Column("problem", "text"),
)


def findings(contents: RunContents) -> list[tuple[str, str]]:
    """Return what a reader should know first, as (tone, sentence)."""
    log = contents.log
    complete = [step for step in log.steps if step.problem is None]
    size, new = (sum(getattr(step, name) for step in log.steps) for name in ("nbytes", "new_bytes"))
    first, last = log.steps[0].number, log.steps[-1].number
    shared = f"; files that steps share save {format_bytes(size - new)}" if size > new else ""
    steps = f"{counted(len(log.steps), 'step')}, {first} to {last}" if last > first else f"1 step, {first}"
    found = [("", f"{steps}: {format_bytes(new)} on the disk{shared}.")]
    times = [step.saved_at for step in complete if step.saved_at is not None]
    if len(times) > 1:
        length = format_seconds(max(0.0, times[-1] - times[0]))
        found.append(("", f"Saved from {format_moment(times[0])} to {format_moment(times[-1])}, within {length}."))
    if log.best and log.best.metrics and log.metric:
        found.append(("good", f"Best step: {log.best.number}, {log.metric} {log.best.metrics[log.metric]:.5g}."))
    found += [("bad", line) for line in _divergence(contents.figures)]
    for number, problem in list(contents.problems.items())[:_NAMED]:
        found.append(("bad", f"Step {number}: {problem}."))
    if len(contents.problems) > _NAMED:
        found.append(("bad", f"{len(contents.problems) - _NAMED:,} more steps have problems; see the table."))
    if line := _motion_line(contents.moves):
        found.append(("", line))
    return found


def _divergence(figures: dict[str, Points]) -> Iterator[str]:
    """Yield a sentence for each figure of training that was NaN or infinite."""
    for name in ("loss", "gradient_norm"):
        bad = [step for step, value in figures.get(f"train/{name}", []) if not math.isfinite(value)]
        if bad:
            count = counted(len(bad), "logged step")
            yield f"The {name.replace('_', ' ')} was not finite at {count}, first at step {bad[0]}."


def _motion_line(motion: Motion | None) -> str:
    if motion is None:
        return ""
    furthest = [(max(_finite(row), default=0.0), layer) for row, layer in zip(motion.moved, motion.layers, strict=True)]
    largest, layer = max(furthest)
    still = sum(1 for moved, _ in furthest if not moved)
    frozen = f" {counted(still, 'layer')} did not move." if still else ""
    if not largest:
        return "No layer moved between the steps that were read."
    return f"Largest move of a layer between two steps: {layer}, relative L2 {largest:.3g}.{frozen}"


def _finite(row: Sequence[float | None]) -> list[float]:
    return [value for value in row if value is not None and math.isfinite(value)]


def run_page(contents: RunContents) -> str:
    """Return the page; MissingExtraError if jinja2 is not installed."""
    log = contents.log
    table = drawn_table(_STEPS, [_row(contents, step) for step in reversed(log.steps)], noun="step")
    return show_page(
        "run.html.j2",
        title_of(log.path),
        {"tensors": table.json},
        path=log.path,
        findings=findings(contents),
        charts=charts(contents),
        cut=contents.cut,
        sizes=_sizes(log.steps),
        shared=_shared(contents.origins),
        motion=None if contents.moves is None else _motion(contents.moves),
        motion_text="" if contents.moves is None else contents.moves.text,
        motion_table=None if contents.moves is None else _motion_table(contents.moves),
        left_out=left_out_text(table, "the latest"),
    )


def charts(contents: RunContents) -> list[Chart]:
    """Return the charts of the figures of the log, and of the metrics of steps that it does not have."""
    figures = dict(contents.figures)
    known = {name.rpartition("/")[2] for name in figures}
    wanted = list(_CHARTS)
    for step in contents.log.steps:
        for name, value in (step.metrics or {}).items():
            if name not in known:
                figures.setdefault(f"steps/{name}", []).append((step.number, value))
    wanted += [(name.removeprefix("steps/"), ((name, "metric of each step"),)) for name in figures if "steps/" in name]
    if "train/peak_memory_bytes" in figures:
        points = figures["train/peak_memory_bytes"]
        figures["train/peak_memory_bytes"] = [(step, value / 1e9) for step, value in points]
    found = []
    for title, names in wanted:
        curves = [
            Curve(label, colour, [(float(step), value) for step, value in figures[name]])
            for (name, label), colour in zip(names, _COLOURS, strict=False)
            if name in figures
        ]
        found.append(chart(title, curves))
    return [each for each in found if each is not None]


def _row(contents: RunContents, step: LoggedStep) -> list[Any]:
    shared = 1 - step.new_bytes / step.nbytes if step.nbytes else None
    ratio = step.state_bytes / step.nbytes if step.state_bytes and step.nbytes else None
    saved = None if step.saved_at is None else format_moment(step.saved_at)
    name = f"{step.number}{' (best)' if step.best else ''}"
    state = step.state_bytes or None
    moved = _moved_most(contents.moves, step.number)
    return [name, saved, step.nbytes, step.new_bytes, shared, state, ratio, moved, contents.problems.get(step.number)]


def _moved_most(motion: Motion | None, step: int) -> str | None:
    if motion is None or step not in motion.steps[1:]:
        return None
    place = motion.steps.index(step) - 1
    moved = [(row[place] or 0.0, layer) for row, layer in zip(motion.moved, motion.layers, strict=True)]
    largest, layer = max(moved)
    return f"{layer} ({largest:.3g})" if largest else None


def _sizes(steps: Sequence[LoggedStep]) -> dict[str, Any]:
    """Return the bars of the sizes of the last steps: new bytes, and those shared with earlier steps."""
    shown = steps[-_MOST_BARS:]
    most = max((step.nbytes for step in shown), default=0) or 1
    wide = min(_SIZES_WIDTH / len(shown), _WIDEST_BAR)
    every = math.ceil(_WIDEST_BAR / wide)
    bars = [
        {
            "x": place * wide + min(1.0, wide * 0.1),
            "width": wide - 2 * min(1.0, wide * 0.1),
            "new": step.new_bytes / most * 150,
            "shared": (step.nbytes - step.new_bytes) / most * 150,
            "title": f"step {step.number}: {format_bytes(step.nbytes)}, of which {format_bytes(step.new_bytes)} new",
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
    """Return the map of which steps have bytes that earlier steps wrote; None if no step shares any."""
    rows = list(origins)[-_MOST_SHARED:]
    sums: dict[int, int] = {}
    for step in rows:
        for origin, nbytes in origins[step].items():
            if origin != step:
                sums[origin] = sums.get(origin, 0) + nbytes
    if not sums:
        return None
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


def _motion(motion: Motion) -> HeatMap:
    def text(row: int, column: int, value: float) -> str:
        steps = f"step {motion.steps[column]} to {motion.steps[column + 1]}"
        return f"{motion.layers[row]}, {steps}: relative L2 {value:.3g}"

    return heat_map(motion.layers, [str(step) for step in motion.steps[1:]], motion.moved, text, log=True)


def _motion_table(motion: Motion) -> ReportTable:
    """Return the moves of each layer in figures, for those who do not see the colours."""
    rows = []
    for layer, row in zip(motion.layers, motion.moved, strict=True):
        moved = _finite(row)
        total = math.fsum(moved)
        figures = (moved[0], moved[-1], max(moved)) if moved else (None, None, None)
        rows.append((Entry(layer), *(_figure(value) for value in (*figures, total))))
    headings = ("layer", ">first move", ">last move", ">largest move", ">sum of moves")
    return ReportTable(
        "Moves of each layer", headings, rows, "Relative L2 differences between the steps that were read."
    )


def _figure(value: float | None) -> Entry:
    return Entry("-") if value is None else Entry(f"{value:.3g}", value)
