"""Mixed precision: 16-bit matmuls, 32-bit weights and losses; in float16, a scaler that is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.run.folder import RunFolder
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.mixed_precision import MixedPrecision
from chatgot.testing import STEPS, TechniqueSuite, last_state, opened, trained, verified_step
from tensorkeep.errors import DivergedError, TechniqueNotActiveError, UnsupportedError
from tiers import exhaustive

MEASURED_PEAK = "chatgot.techniques.mixed_precision.measured_peak"


class TestMixedPrecision(TechniqueSuite):
    technique = MixedPrecision
    variants = ({"dtype": "bf16"}, {"dtype": "fp16"}, *exhaustive({"dtype": "bf16", "attention": "same"}))

    def break_on_purpose(self, run: StepState) -> None:
        run.operations.loss = run.model.loss

    def test_weights_and_gradients_stay_in_32_bits(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"dtype": "bf16"}), tmp_path / "run", data) as run:
            run.operations.backward(run.operations.loss(*next(run.batches)))
            for parameter in run.model.parameters():
                assert parameter.grad is not None
                assert parameter.dtype == parameter.grad.dtype == torch.float32

    @pytest.mark.parametrize(("length", "chosen"), [(255, "float32"), (256, "same")])
    def test_attention_of_short_contexts_is_float32_on_a_cpu(self, length: int, chosen: str) -> None:
        config = self.config_with({"dtype": "bf16"}).changed({"model.context_length": length})
        technique = MixedPrecision(MixedPrecision.Settings(dtype="bf16"))
        assert technique.configure(config).techniques["mixed-precision"]["attention"] == chosen

    def test_attention_in_another_precision_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"dtype": "bf16", "attention": "float32"}), tmp_path / "run", data) as run:
            run.model.attentions[1].kernel = torch.nn.functional.scaled_dot_product_attention
            with pytest.raises(TechniqueNotActiveError, match=r"attention returned float32 \(2\), bfloat16 \(2\)"):
                verified_step(run)

    def test_overflowing_gradient_lowers_the_scale_and_keeps_the_weights(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"dtype": "fp16"}), tmp_path / "run", data) as run:
            (technique,) = run.techniques.techniques
            take_step(run)
            scale = technique.state_dict()["scaler"]["scale"]
            before = {name: each.clone() for name, each in run.model.state_dict().items()}
            hook = run.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
            take_step(run)
            hook.remove()
            assert technique.state_dict()["scaler"]["scale"] == scale / 2
            assert (technique.state_dict()["skipped"], run.progress.skipped) == (1, 0)
            for name, each in run.model.state_dict().items():
                assert torch.equal(each, before[name])

    def test_gradients_that_overflow_at_any_scale_end_the_run(self, tmp_path: Path, data: Path) -> None:
        """Otherwise the run would never make an update."""
        with opened(self.config_with({"dtype": "fp16"}), tmp_path / "run", data) as run:
            run.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
            # From 65,536 to 1.
            for _ in range(16):
                take_step(run)
            with pytest.raises(DivergedError, match="the gradient norm is nan"):
                take_step(run)

    @pytest.mark.parametrize("broken", ["loss", "gradient"])
    def test_run_continues_after_an_update_that_the_guard_skips(self, tmp_path: Path, data: Path, broken: str) -> None:
        config = self.config_with({"dtype": "fp16"})
        with opened(config.changed({"loop.on_divergence": "skip"}), tmp_path / "run", data) as run:
            (technique,) = run.techniques.techniques
            inner, nan = run.operations.loss, float("nan")
            if broken == "loss":
                run.operations.loss = lambda inputs, targets: inner(inputs, targets) * nan
            hook = run.model.norm.weight.register_hook(lambda gradient: gradient * nan)
            # A gradient first lowers the scale to 1.
            lowered = 16 if broken == "gradient" else 0
            for _ in range(lowered + 1):
                take_step(run)
            assert (run.progress.skipped, technique.state_dict()["skipped"]) == (1, lowered)
            hook.remove()
            run.operations.loss = inner
            take_step(run)
            assert (run.progress.skipped, run.progress.skipped_in_a_row) == (1, 0)

    def test_scaler_is_part_of_a_checkpoint(self, data: Path) -> None:
        saved = last_state(trained(self.config_with({"dtype": "fp16"}), data))["techniques"]["mixed-precision"]
        assert saved["scaler"]["_growth_tracker"] == STEPS

    def test_faster_precision_is_chosen_and_stored_with_the_run_and_none_is_refused(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peaks = {torch.float32: 1e9, torch.bfloat16: 1e9, torch.float16: 2e9}
        monkeypatch.setattr(MEASURED_PEAK, lambda device, dtype=torch.float32: peaks[dtype])
        config, folder = self.config_with({}), tmp_path / "run"
        with opened(config, folder, data) as run:
            assert run.config.techniques == {"mixed-precision": {"dtype": "fp16", "attention": "float32"}}
            assert run.speed.peak == 2e9
        assert RunFolder(folder).record().config.techniques == run.config.techniques
        peaks[torch.float16] = 1e9
        with pytest.raises(UnsupportedError, match="would not be faster here"), opened(config, tmp_path / "no", data):
            pass

    @pytest.mark.parametrize(
        ("rates", "chosen"),
        [
            ({"bf16": [2.0], "fp16": [2.2]}, "bf16"),
            ({"bf16": [0.4], "fp16": [8.0]}, "fp16"),
            ({"bf16": [0.8], "fp16": [1.3]}, "fp16"),
            # Both are about 1.1 times as fast as float32, one of them a little less.
            ({"bf16": [1.09], "fp16": [1.11]}, "bf16"),
            # Another process slowed down the first measurement of bfloat16.
            ({"bf16": [1.9, 3.0], "fp16": [3.0]}, "bf16"),
            # The last measurement alone was undisturbed.
            ({"bf16": [1.0, 1.0, 1.6], "fp16": [1.0]}, "bf16"),
        ],
    )
    def test_noise_does_not_choose(self, monkeypatch: pytest.MonkeyPatch, rates: dict[str, Any], chosen: str) -> None:
        left = {torch.float32: [1.0], torch.bfloat16: rates["bf16"], torch.float16: rates["fp16"]}

        def measured(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
            values = left[dtype]
            return values.pop(0) if len(values) > 1 else values[0]

        monkeypatch.setattr(MEASURED_PEAK, measured)
        configured = MixedPrecision(MixedPrecision.Settings()).configure(self.config)
        assert configured.techniques["mixed-precision"]["dtype"] == chosen
