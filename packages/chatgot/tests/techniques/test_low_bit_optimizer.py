"""AdamW with states of 8 and 4 bits: which ones are quantised, and how they are saved."""

from pathlib import Path

import pytest
import torch

from chatgot.optim.optimizers import build_optimizers
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.low_bit_optimizer import LowBitOptimizer
from chatgot.testing import TINY, TechniqueSuite, last_state, opened, train_run, verified_step
from tensorkeep.errors import UsageError

LARGE = "an MLP's matrices have 4,096 elements in the suite's model, all others fewer"
DTYPES = {8: torch.uint8, 4: torch.uint8, "fp8": torch.float8_e4m3fn}


class TestLowBitOptimizer(TechniqueSuite):
    technique = LowBitOptimizer
    # Compilation takes longer than the whole suite.
    variants = ({"compiled": False}, pytest.param({"bits": 4, "compiled": False}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
        """Fall back to torch's optimizer."""
        run.optimizers["adamw"] = build_optimizers(run.model, run.config.optim)["adamw"]

    @pytest.mark.parametrize("bits", [8, 4, "fp8"])
    def test_quantised_states_are_saved_as_plain_tensors(self, tmp_path: Path, data: Path, bits: int | str) -> None:
        # Eight is the default.
        given = {"compiled": False} if bits == 8 else {"bits": bits, "compiled": False}
        train_run(self.config_with(given), tmp_path / "run", data, stop_after=1)
        state = last_state(tmp_path / "run")
        sizes = [each.numel() for each in state["model"].values()]
        states = state["optimizers"]["adamw"]["state"].values()
        quantised = [each for each in states if isinstance(each["exp_avg"], dict)]
        assert len(quantised) == sum(size >= 4096 for size in sizes) == 4, LARGE
        for each in quantised:
            for key in ("exp_avg", "exp_avg_sq"):
                codes = each[key]["codes"]
                assert type(codes) is torch.Tensor
                assert (codes.dtype, codes.nbytes) == (DTYPES[bits], 2048 if bits == 4 else 4096)
                assert bool(each[key]["scale"].any())

    def test_proof_has_the_quantised_fraction_and_rates_stay_numbers(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"compiled": False}), tmp_path / "run", data) as run:
            figures = verified_step(run)["low-bit-optimizer"]
            weights = sum(each.numel() for each in run.model.parameters())
            rate = take_step(run)["learning_rate"]
            assert [group["lr"] for group in run.optimizers["adamw"].param_groups] == [rate, rate]
        assert figures["plain_bytes"] == 8 * weights
        # One byte for each element and a float32 for each 256, and a table of 256 float32 in each tensor.
        quantised = 4 * 2 * (4096 + 4096 // 256 * 4 + 1024)
        assert figures["state_bytes"] == 8 * (weights - 4 * 4096) + quantised
        assert figures["share"] == quantised / figures["state_bytes"]

    def test_states_of_torch_adamw_are_quantised_on_load(self, tmp_path: Path, data: Path) -> None:
        with opened(TINY, tmp_path / "plain", data) as run:
            take_step(run)
            plain = run.optimizers["adamw"].state_dict()
        with opened(self.config_with({"compiled": False}), tmp_path / "run", data) as run:
            run.optimizers["adamw"].load_state_dict(plain)
            for index, weight in enumerate(w for g in run.optimizers["adamw"].param_groups for w in g["params"]):
                momentum = run.optimizers["adamw"].state[weight]["exp_avg"]
                given = plain["state"][index]["exp_avg"]
                assert (type(momentum) is torch.Tensor) == (weight.numel() < 4096)
                near = momentum if weight.numel() < 4096 else momentum.dequantize()
                torch.testing.assert_close(near, given, rtol=0.1, atol=0.05 * float(given.abs().max()))

    def test_model_without_a_large_tensor_is_refused(self, tmp_path: Path, data: Path) -> None:
        config = self.config_with({"compiled": False}).changed({"model.d_model": 16})
        with pytest.raises(UsageError, match="would quantise nothing"):
            train_run(config, tmp_path / "run", data)

    @pytest.mark.exhaustive
    def test_compiled_update_equals_the_plain_one(self, tmp_path: Path, data: Path) -> None:
        weights = []
        for compiled in (True, False):
            with opened(self.config_with({"compiled": compiled}), tmp_path / str(compiled), data) as run:
                for _ in range(2):
                    take_step(run)
                weights.append([each.detach().clone() for each in run.model.parameters()])
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
