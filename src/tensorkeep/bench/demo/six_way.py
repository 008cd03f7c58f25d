"""Part 5 of the demo: the six-way comparison with Tensorkeep beside it, one quick run of each arm."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tensorkeep.bench.checkpoint.gate import check_equal, read_state
from tensorkeep.bench.checkpoint.measure import SAVE, STORED, WARM, save_durably
from tensorkeep.bench.checkpoint.probes import remove, stored_bytes
from tensorkeep.bench.checkpoint.tools.array_tools import TensorstoreTool
from tensorkeep.bench.checkpoint.tools.registry import parse_tool
from tensorkeep.bench.checkpoint.workload import CheckpointInput
from tensorkeep.bench.experiment.library import read_experiment
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.experiment.workload import GateError, Outcome, Task
from tensorkeep.bench.results import Arm, Cell, Limits, Results
from tensorkeep.bench.results_file import FILE_NAME
from tensorkeep.bench.run.runner import ExperimentRun, Listener, plan_results
from tensorkeep.errors import TensorkeepError
from tensorkeep.structs import prepared

_OURS = (
    Arm("tensorkeep", settings={"tool": "tensorkeep"}, about="tensorkeep.save: raw, durable, verified."),
    Arm("tensorkeep-lossless", settings={"tool": "tensorkeep", "compression": "lossless"}, about="A third smaller."),
)
_MODEL = "openllama-3b:scale=0.04:float16"
_SLOW_MODEL = "openllama-3b:scale=0.012:layers=2:float16"


def compare_six_ways(folder: Path, progress: Callable[[str], None]) -> Results:
    """Save and load once with each arm of the experiment ``six-way``, and with Tensorkeep, in this process.

    The arms of TensorStore are slow and work on a smaller state, so the figures are compared per byte. One run gives no
    verdict; ``tensorkeep bench checkpoint --experiment six-way`` measures with confidence.
    """
    shipped = read_experiment("six-way")
    arms = [replace(arm, slow=_is_array_tool(arm)) for arm in shipped.arms if arm.role != "control"]
    models = {"model": _MODEL, "slow_model": _SLOW_MODEL}
    experiment = replace(
        shipped.experiment,
        title="Six ways to checkpoint, and Tensorkeep",
        control=False,
        settings={**shipped.experiment.settings, **models},
    )
    planned = plan_results(Plan(experiment, (*arms, *_OURS)).with_design(runs=1), "tensorkeep demo")
    measures = tuple(measure for measure in planned.measures if measure.name in (SAVE, WARM, STORED))
    run = ExperimentRun(replace(planned, measures=measures), folder / FILE_NAME, folder, _run_once)
    run.execute(_Progress(progress))
    return run.results


def _is_array_tool(arm: Arm) -> bool:
    return isinstance(parse_tool(arm.settings), TensorstoreTool)


class _Progress(Listener):
    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress

    def cell_started(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None:
        self._progress(f"six ways: {cell.arm} ({done + 1} of {total})")


def _run_once(task: Task, limits: Limits) -> Outcome:
    """Save, load and compare once; an arm that cannot run has the reason."""
    tool = parse_tool(task.settings)
    if reason := tool.missing():
        return Outcome("not-run", reason)
    folder = Path(task.directory)
    folder.mkdir()
    path = folder / f"state{tool.suffix}"
    try:
        state = tool.view(msgspec.convert(task.input, prepared(CheckpointInput)).load())
        _, saving = save_durably(tool, state, path)
        begin = time.perf_counter()
        loaded = read_state(tool, path, None)
        loading = time.perf_counter() - begin
        check_equal(loaded, state, task.arm)
    except GateError as error:
        return Outcome("gate", error.message)
    except TensorkeepError as error:
        return Outcome("failed", error.message)
    else:
        return Outcome(seconds=saving + loading, figures={SAVE: saving, WARM: loading, STORED: stored_bytes(path)})
    finally:
        remove(folder)
