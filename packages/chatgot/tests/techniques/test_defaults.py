"""Default techniques: turned on where they can run, with a note on those that cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.config.config import Config
from chatgot.config.recipes import get_recipe
from chatgot.run.folder import RunFolder
from chatgot.techniques import mixed_precision
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import Stack, turn_on_defaults
from chatgot.testing import TINY, opened, train_run, with_techniques
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.testing.cases import case
from tiny_training import check_same

ON_CPU = Machine(torch.device("cpu"))


def defaulting(*names: str, config: Config = TINY) -> Config:
    return config.changed({"default_techniques": {name: {} for name in names}})


class Hopper(Machine):
    """A GPU with everything that techniques ask for."""

    capability = (9, 0)  # type: ignore[assignment]

    def missing_package(self, module: str, *, install: str) -> None:
        return None


def test_what_cannot_run_is_off_with_the_reason() -> None:
    config, off = turn_on_defaults(defaulting("cuda-graphs", "fused-optimizer"), ON_CPU)
    assert config.techniques == {"fused-optimizer": {}} and config.optim.implementation == "fused"
    assert off == ["cuda-graphs needs a CUDA device; the run is on cpu"]
    assert not config.default_techniques


def test_a_requested_technique_that_cannot_run_stays_an_error(tmp_path: Path, data: Path) -> None:
    config = defaulting("cuda-graphs").changed({"techniques.cuda-graphs": "on"})
    assert not config.default_techniques
    with pytest.raises(UnsupportedError, match="cuda-graphs needs a CUDA device"), opened(config, tmp_path, data):
        pass


def test_a_default_gives_way_to_a_requested_technique_and_to_masked_documents() -> None:
    asked = with_techniques(TINY, {"tensor-parallel": {}})
    config, off = turn_on_defaults(defaulting("fused-cross-entropy", config=asked), ON_CPU)
    assert list(config.techniques) == ["tensor-parallel"]
    assert "cannot be combined" in off[0]
    defaults = {"default_techniques": {"attention-kernel": {"kernel": "math"}}}
    config, off = turn_on_defaults(TINY.changed({**defaults, "data.mask_documents": True}), ON_CPU)
    assert not config.techniques
    assert off[0].startswith("attention-kernel: data.mask_documents is true")
    config, off = turn_on_defaults(TINY.changed(defaults), ON_CPU)
    assert (list(config.techniques), off) == (["attention-kernel"], [])


def test_a_precision_that_is_not_faster_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "measured_peak", lambda *arguments: 1e9)
    config, off = turn_on_defaults(defaulting("mixed-precision"), ON_CPU)
    assert not config.techniques and "would not be faster here" in off[0]


@pytest.mark.parametrize(
    ("settings", "techniques", "defaults"),
    [
        ({"techniques.compile": "off"}, {}, {}),
        ({"default_techniques": "none"}, {}, {}),
        ({"techniques.compile": "on"}, {"compile": {"dynamic": True}}, {}),
        ({"techniques.compile.fullgraph": True}, {"compile": {"dynamic": True, "fullgraph": True}}, {}),
        ({"optim.lr": 0.1}, {}, {"compile": {"dynamic": True}}),
    ],
)
def test_settings_take_a_default_over(settings: dict[str, Any], techniques: Any, defaults: Any) -> None:
    config = TINY.changed({"default_techniques": {"compile": {"dynamic": True}}}).changed(settings)
    assert (config.techniques, config.default_techniques) == (techniques, defaults)


def test_a_single_default_is_set_as_a_technique() -> None:
    for name in ("default_techniques.compile", "default_techniques"):
        with case(name), pytest.raises(UsageError, match=r"give .*techniques"):
            defaulting("compile").changed({name: "on"})


def test_a_run_notes_what_is_off_records_what_was_on_and_resumes_with_it(tmp_path: Path, data: Path) -> None:
    config = defaulting("fused-optimizer", "cuda-graphs")
    with opened(config, tmp_path / "run", data) as run:
        assert run.notes == ("off on cpu: cuda-graphs needs a CUDA device; the run is on cpu",)
        assert [each.name for each in run.techniques.techniques] == ["fused-optimizer"]
    train_run(config, tmp_path / "whole", data)
    train_run(config, tmp_path / "resumed", data, stop_after=3)
    record = RunFolder(tmp_path / "resumed").record().config
    assert list(record.techniques) == ["fused-optimizer"] and not record.default_techniques
    train_run(record, tmp_path / "resumed", data, resume=True)
    check_same(tmp_path / "resumed", tmp_path / "whole", "train", "evaluate")


@pytest.mark.parametrize("recipe", ["gpt2-124m", "shakespeare-char-gpu", "chatgot-85m"])
def test_all_defaults_of_a_recipe_run_together_on_a_gpu(recipe: str) -> None:
    config = get_recipe(recipe)
    Stack.of(config.default_techniques).check(Hopper(torch.device("cuda")))
    expected = {"mixed-precision", "compile", "fused-optimizer", "tf32", "attention-kernel"}
    assert expected <= set(config.default_techniques)
