"""Another activation of the MLPs: which one runs, and that models are equally large."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.activation_function import ActivationFunction, ActivationSettings
from tensorkeep.train.techniques.stack import Stack


def configured(wanted: str, /, **model: object) -> Config:
    """Return the configuration of a run with a technique on."""
    config = TINY.changed({f"model.{name}": value for name, value in model.items()})
    return ActivationFunction(ActivationSettings(activation=wanted)).configure(config)  # type: ignore[arg-type]


class TestActivationFunction(TechniqueSuite):
    technique = ActivationFunction
    variants = ({"activation": "relu2"}, {"activation": "swiglu"})

    def sabotage(self, run: Run) -> None:
        """Let a block have the function of another model, as if it had been copied from there."""
        run.model.blocks[1].mlp.activation = torch.tanh

    def test_each_one_is_seen_and_trains_differently(self, tmp_path: Path, data: Path) -> None:
        second_losses = set()
        for name in ("gelu", "relu2", "swiglu", "geglu"):
            with open_run(self.on({"activation": name}), RunFolder(tmp_path / name), Dataset.open(data)) as run:
                with run.techniques.verified(run):
                    take_step(run)
                second_losses.add(take_step(run)["loss"])
                assert run.techniques.proofs["activation-function"].figures["activation"] == name
        assert len(second_losses) == 4

    def test_an_mlp_without_a_gate_is_no_swiglu(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({"activation": "swiglu"}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            run.model.blocks[0].mlp.gate = None
            with pytest.raises(TechniqueNotActiveError, match="blocks 0 of 2"), run.techniques.verified(run):
                take_step(run)

    def test_silu_is_no_geglu_even_where_it_is_almost_linear(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({"activation": "geglu"}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            for block in run.model.blocks:
                block.mlp.activation = functional.silu
            with pytest.raises(TechniqueNotActiveError, match="not geglu"), run.techniques.verified(run):
                take_step(run)

    def test_the_proof_counts_the_parameters_that_there_are(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({"activation": "swiglu"}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            figures = run.techniques.proofs["activation-function"].figures
            assert figures["parameters"] == sum(each.numel() for each in run.model.parameters())
            assert figures["width"] == run.model.blocks[0].mlp.gate.out_features


def test_a_process_that_has_some_of_the_blocks_could_not_prove_it() -> None:
    with pytest.raises(UsageError, match="a process has some of them"):
        Stack.of({"activation-function": {}, "pipeline-parallel": {}})


@pytest.mark.parametrize("d_model", [64, 128, 768, 3200])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_a_gated_model_is_as_large_as_one_that_is_not(activation: str, d_model: int) -> None:
    gated, plain = configured(activation, d_model=d_model).model, configured("gelu", d_model=d_model).model
    assert gated.mlp_width < plain.mlp_width == 4 * d_model
    assert gated.parameter_count() == pytest.approx(plain.parameter_count(), rel=0.05)
    assert gated.flops_per_token() == pytest.approx(plain.flops_per_token(), rel=0.05)


def test_a_width_that_is_the_default_gives_way_to_the_new_default() -> None:
    assert configured("swiglu", d_model=256, d_ff=1024).model.d_ff is None
    assert configured("swiglu", d_model=256, d_ff=1024).model.mlp_width == 688


def test_a_width_that_matches_stays() -> None:
    assert configured("geglu", d_model=256, d_ff=672).model.mlp_width == 672


def test_a_gated_model_at_4_d_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\+50% parameters") as caught:
        configured("swiglu", d_model=256, d_ff=1024, activation="swiglu")
    assert "width of 688" in str(caught.value.remedy)


def test_any_width_will_do_where_nothing_is_gated() -> None:
    assert configured("relu2", d_model=256, d_ff=512).model.mlp_width == 512


def test_a_run_that_goes_on_is_configured_as_it_was() -> None:
    once = configured("swiglu", d_model=256, d_ff=1024)
    assert ActivationFunction(ActivationSettings()).configure(once) == once
