"""The exam of a technique for several processes: that of any technique, and what two of them do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tensorkeep.testing.equality import difference
from tensorkeep.testing.technique_suite import STEPS, TINY, TechniqueSuite, last_state, losses, train_run
from tensorkeep.train.config.config import Config
from tensorkeep.train.run.folder import RunFolder
from train.techniques.several_processes import EXACT, Task, done_by, generated, group_of_one, task

HALF = STEPS // 2

Two = tuple[Path, list[dict[str, Any]]]
"""Where two processes have done their tasks, and what came of each, by process and name."""

_OTHER_PARTS = {
    "model.positions": "rotary",
    "model.token_shift": True,
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.tied": False,
    "ema.decay": 0.9,
}


class TogetherSuite(TechniqueSuite):
    """Subclass it as `TechniqueSuite`, and name ways to tamper with it; see `several_processes.TAMPER`.

    Starting processes takes longer than what they do, so one start serves all tests of a class.
    """

    tampered: ClassVar[Mapping[str, str]] = {}
    """What is said of each."""

    stepped: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """What to change of `EXACT` for further watched steps, by the name under which `two` has what came of each."""

    models: ClassVar[Sequence[Mapping[str, object]]] = ({}, _OTHER_PARTS)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def group(cls) -> Iterator[None]:
        """Let the exam of any technique be sat by a group of one process."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with group_of_one(), pytest.MonkeyPatch.context() as patches:
            patches.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
            yield
        torch.set_num_threads(threads)

    @classmethod
    def together(cls, config: Config) -> Config:
        """Return a configuration with the technique on."""
        return config.changed({f"techniques.{cls.technique.name}": "on"})

    @pytest.fixture(scope="class")
    @classmethod
    def two(cls, tmp_path_factory: pytest.TempPathFactory, data: Path) -> Two:
        """Let two processes do, once, all that the tests of the class look at."""
        place = tmp_path_factory.mktemp("two")
        train_run(EXACT, place / "from-one", data, stop_after=HALF)
        return place, done_by(2, cls._tasks(place, data), place)

    @classmethod
    def _tasks(cls, place: Path, data: Path) -> dict[str, Task]:
        dropping, exact = cls.together(TINY), cls.together(EXACT)
        tasks = {
            "whole": task("train", dropping, place / "whole", data),
            "first half": task("train", dropping, place / "parts", data, stop_after=HALF),
            "second half": task("train", dropping, place / "parts", data, resume=True),
            "to one": task("train", exact, place / "to-one", data, stop_after=HALF),
            "from one": task("train", exact, place / "from-one", data, resume=True),
            "watched": task("step", exact, place / "watched", data),
            "generated": task("generate", exact.changed(cls.models[-1]), place / "generated", data),
        }
        for number, model in enumerate(cls.models):
            tasks[f"model {number}"] = task("train", exact.changed(model), place / f"model{number}", data)
        for name, changes in cls.stepped.items():
            tasks[name] = task("step", exact.changed(changes), place / name, data)
        for name in cls.tampered:
            tasks[f"tampered: {name}"] = task("step", dropping, place / f"tampered {name}", data, tamper=name)
        return tasks

    def test_two_processes_compute_what_one_does(self, two: Two, tmp_path: Path, data: Path) -> None:
        """The losses, in training and evaluation, are those of one process with the same batches."""
        place, _ = two
        for number, model in enumerate(self.models):
            train_run(EXACT.changed(model), tmp_path / str(number), data)
            alone, together = losses(tmp_path / str(number)), losses(place / f"model{number}")
            assert [each[:2] for each in together] == [each[:2] for each in alone]
            assert [each[2] for each in together] == pytest.approx([each[2] for each in alone], rel=1e-4)

    def test_two_processes_go_on_exactly(self, two: Two) -> None:
        """A run with dropout that was stopped ends as one that was not, bit for bit, each process with its numbers."""
        place, _ = two
        assert losses(place / "parts") == losses(place / "whole")
        assert difference(last_state(place / "parts"), last_state(place / "whole")) is None

    def test_one_process_goes_on_with_what_two_saved(self, two: Two, tmp_path: Path, data: Path) -> None:
        """A checkpoint of two processes is one of a single process, with the technique off."""
        place, _ = two
        config = RunFolder(place / "to-one").record().config.changed({f"techniques.{self.technique.name}": "off"})
        train_run(config, place / "to-one", data, resume=True)
        train_run(EXACT, tmp_path / "alone", data)
        assert not self._differences(place / "to-one", tmp_path / "alone")

    def test_two_processes_go_on_with_what_one_saved(self, two: Two, tmp_path: Path, data: Path) -> None:
        """And the other way round."""
        place, _ = two
        train_run(EXACT, tmp_path / "alone", data)
        assert not self._differences(place / "from-one", tmp_path / "alone")

    def _differences(self, first: Path, second: Path) -> list[str]:
        """Return in what two runs do not end alike."""
        found, wanted = last_state(first), last_state(second)
        same = {
            "losses": [each[2] for each in losses(first)] == pytest.approx([e[2] for e in losses(second)], rel=1e-4),
            "names": list(found["model"]) == list(wanted["model"]),
            "tokens": found["progress"]["tokens"] == wanted["progress"]["tokens"],
            "batches": found["batches"] == wanted["batches"],
            "optimizers": difference(_shapes(found["optimizers"]), _shapes(wanted["optimizers"])) is None,
        }
        for name, tensor in wanted["model"].items():
            # Gradients of next to nothing, as those of the keys' biases, AdamW makes steps of any sign.
            if tensor.ndim == 2:
                same[name] = bool((found["model"][name] - tensor).norm() < 0.01 * tensor.norm())
        return [what for what, alike in same.items() if not alike]

    def test_both_processes_see_the_same(self, two: Two) -> None:
        """Loss, norm and tokens are those of the whole batch in each process, and each sees the technique at work."""
        _, said = two
        seen = [process["watched"] for process in said]
        assert seen[0]["record"] == seen[1]["record"]
        assert [each["tokens"] for each in seen] == [EXACT.loop.batch_size * EXACT.loop.accumulate * 16] * 2
        for each in seen:
            assert each["proofs"][self.technique.name]["processes"] == 2

    def test_both_processes_generate_the_same_text(self, two: Two, tmp_path: Path, data: Path) -> None:
        """And the text that one process generates."""
        _, said = two
        alone = generated(task("generate", EXACT.changed(self.models[-1]), tmp_path / "alone", data))
        for process in said:
            assert process["generated"] == alone

    def test_tampering_is_caught_in_every_process(self, two: Two) -> None:
        """Asked for but not at work is an error in each of them."""
        _, said = two
        for process in said:
            for name, message in self.tampered.items():
                refused = process[f"tampered: {name}"]
                assert refused.get("kind") == "technique-not-active", name
                assert message in refused["message"], name


def _shapes(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _shapes(each) for key, each in state.items()}
    if isinstance(state, list):
        return [_shapes(each) for each in state]
    return [*state.shape] if isinstance(state, torch.Tensor) else state
