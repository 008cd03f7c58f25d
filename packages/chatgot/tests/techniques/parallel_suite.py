"""Conformance suite of a technique for several processes: the suite of any technique, and runs of two or more."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from chatgot.config.config import Config
from chatgot.run.state import OpenRun
from chatgot.testing import TINY, TechniqueSuite, killed_copy, last_state, losses, train_run, trained
from techniques.several_processes import (
    BREAKS,
    EXACT,
    FOUR_STEPS,
    ProcessPool,
    Results,
    Task,
    evaluated,
    generated,
    group_of_one,
    task,
)
from tensorkeep.testing.equality import difference
from tiny_training import check_same

SHORT, SHORT_DROPPING = (config.changed(FOUR_STEPS) for config in (EXACT, TINY))
HALF = SHORT.loop.steps // 2


class ProcessRun(NamedTuple):
    """The folder in which several processes did their tasks, and their results."""

    folder: Path
    results: Results


_OTHER_MODEL = {"model.positions": "rotary", "model.token_shift": "blocks", "model.convolution": 3, "ema.decay": 0.9}
_OTHER_MODEL |= {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.bias": False, "model.tied": False}


class ParallelSuite(TechniqueSuite):
    """Subclass it like `TechniqueSuite`, and name ways to break a run; see `several_processes.BREAKS`.

    All tasks of a class are sent at once to the processes, which are started once for all classes.
    """

    processes: ClassVar[int] = 2

    others: ClassVar[Mapping[str, object]] = {}
    """Changes of the configuration that turn on the techniques beside which this one is tested."""

    broken: ClassVar[Mapping[str, str]] = {}
    """The error message of each way to break a run."""

    stepped: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Changes of `EXACT` for further verified steps, by the name of the result."""

    models: ClassVar[Sequence[Mapping[str, object]]] = ({}, _OTHER_MODEL)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def group(cls) -> Iterator[None]:
        """Run the tests of `TechniqueSuite` in a group of one process."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with group_of_one():
            yield
        torch.set_num_threads(threads)

    @classmethod
    def with_technique(cls, config: Config) -> Config:
        """Return a configuration with the technique on."""
        return config.changed({f"techniques.{cls.technique.name}": "on", **cls.others})

    @pytest.fixture(scope="class")
    @classmethod
    def together(
        cls, tmp_path_factory: pytest.TempPathFactory, data: Path, request: pytest.FixtureRequest
    ) -> ProcessRun:
        """Let several processes do, once, all tasks of the class."""
        pool: ProcessPool = request.getfixturevalue({2: "two_processes", 4: "four_processes"}[cls.processes])
        folder = tmp_path_factory.mktemp("together")
        killed_copy(trained(SHORT, data), folder / "from-one", step=HALF)
        results = pool.run(cls._tasks(folder, data))
        killed_copy(folder / "whole", folder / "resumed", step=HALF)
        pool.run({"rest": task("train", cls.with_technique(SHORT_DROPPING), folder / "resumed", data, resume=True)})
        return ProcessRun(folder, results)

    @classmethod
    def _tasks(cls, folder: Path, data: Path) -> dict[str, Task]:
        dropping, exact = cls.with_technique(SHORT_DROPPING), cls.with_technique(SHORT)
        tasks = {
            "whole": task("train", dropping, folder / "whole", data),
            "from one": task("train", exact, folder / "from-one", data, resume=True),
            "verified": task("step", exact, folder / "verified", data),
            "evaluated": task("evaluate", exact, folder / "evaluated", data),
            "generated": task("generate", exact.changed(cls.models[-1]), folder / "generated", data),
        }
        for number, model in enumerate(cls.models):
            tasks[f"model {number}"] = task("train", exact.changed(model), folder / f"model{number}", data)
        for name, changes in cls.stepped.items():
            tasks[name] = task("step", exact.changed(changes), folder / name, data)
        for name in cls.broken:
            tasks[f"broken: {name}"] = task("step", dropping, folder / f"broken {name}", data, **{"break": name})
        return tasks

    def test_processes_compute_the_same_as_one(self, together: ProcessRun, data: Path) -> None:
        """The losses of training and evaluation equal the losses of one process with the same batches."""
        for number, model in enumerate(self.models):
            alone, found = losses(trained(SHORT.changed(model), data)), losses(together.folder / f"model{number}")
            assert [each[:2] for each in found] == [each[:2] for each in alone]
            assert [each[2] for each in found] == pytest.approx([each[2] for each in alone], rel=1e-4)

    def test_processes_resume_exactly(self, together: ProcessRun) -> None:
        """A run with dropout that was killed and resumed ends bit-identical to one that was not."""
        check_same(together.folder / "resumed", together.folder / "whole", "train", "evaluate")

    def test_one_process_resumes_what_several_saved(self, together: ProcessRun, data: Path) -> None:
        """A checkpoint of several processes is one of a single process with the techniques off."""
        copy = killed_copy(together.folder / "model0", together.folder / "to-one", step=HALF)
        train_run(SHORT, copy, data, resume=True)
        assert not self._differences(copy, trained(SHORT, data))

    def test_processes_resume_what_one_saved(self, together: ProcessRun, data: Path) -> None:
        """A checkpoint of a single process can be resumed by several."""
        assert not self._differences(together.folder / "from-one", trained(SHORT, data))

    def _differences(self, first: Path, second: Path) -> list[str]:
        """Return the differences between the final states of two runs."""
        found, expected = last_state(first), last_state(second)
        same = {
            "losses": [each[2] for each in losses(first)] == pytest.approx([e[2] for e in losses(second)], rel=1e-4),
            "names": list(found["model"]) == list(expected["model"]),
            "tokens": found["progress"]["tokens"] == expected["progress"]["tokens"],
            "batches": found["batches"] == expected["batches"],
            "optimizers": difference(_shapes(found["optimizers"]), _shapes(expected["optimizers"])) is None,
        }
        for name, tensor in expected["model"].items():
            # Matrices only: AdamW turns tiny gradients, such as of the key biases, into steps of any sign.
            if tensor.ndim == 2:
                same[name] = bool((found["model"][name] - tensor).norm() < 0.01 * tensor.norm())
        return [name for name, equal in same.items() if not equal]

    def test_processes_report_the_same(self, together: ProcessRun) -> None:
        """Every process has the loss, norm and tokens of the whole batch, and a proof."""
        steps = [process["verified"] for process in together.results]
        assert len(steps) == self.processes
        for each in steps:
            assert each["record"] == steps[0]["record"]
            assert each["tokens"] == EXACT.loop.batch_size * EXACT.loop.gradient_accumulation_steps * 16
            assert each["proofs"][self.technique.name]["processes"] == self.processes

    def test_processes_divide_an_evaluation(self, together: ProcessRun, tmp_path: Path, data: Path) -> None:
        """Those with data of their own evaluate a part of the windows each; all get the loss of one process."""
        alone = evaluated(task("evaluate", EXACT, tmp_path / "alone", data))
        found = [process["evaluated"] for process in together.results]
        assert [each["loss"] for each in found] == [found[0]["loss"]] * self.processes
        assert found[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        parts = found[0]["parts"]
        assert sum(each["targets"] for each in found) == alone["targets"] * self.processes / parts
        assert {each["rows"] for each in found} == {-(-alone["rows"] // parts)}

    def test_processes_log_the_gradient_norms_of_one(self, together: ProcessRun, tmp_path: Path, data: Path) -> None:
        """Each process has the norm of each layer, whatever part of the gradient it holds."""
        alone = evaluated(task("evaluate", EXACT, tmp_path / "norms", data))["norms"]
        for process in together.results:
            assert list(process["evaluated"]["norms"]) == list(alone)
            assert process["evaluated"]["norms"] == pytest.approx(alone, rel=1e-3)

    def test_processes_generate_the_text_of_one(self, together: ProcessRun, tmp_path: Path, data: Path) -> None:
        """Generation gives the same tokens in each process as in a single one."""
        alone = generated(task("generate", EXACT.changed(self.models[-1]), tmp_path / "alone", data))
        assert [process["generated"] for process in together.results] == [alone] * self.processes

    def test_a_broken_run_is_an_error_in_every_process(self, together: ProcessRun) -> None:
        """Each process reports that the technique is not active."""
        for process in together.results:
            for name, message in self.broken.items():
                error = process[f"broken: {name}"]
                assert error.get("kind") == "technique-not-active", name
                assert message in error["message"], name


def _shapes(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _shapes(each) for key, each in state.items()}
    if isinstance(state, list):
        return [_shapes(each) for each in state]
    return [*state.shape] if isinstance(state, torch.Tensor) else state


class ShardedSuite(ParallelSuite):
    """The tests of a technique that gives each process a part of the model."""

    broken: ClassVar = {"copy": "parameters are not sharded", "optimizer": "tensors that are not the model's"}

    def break_on_purpose(self, run: OpenRun) -> None:
        """Train a model that is not sharded."""
        BREAKS["copy"](run)
