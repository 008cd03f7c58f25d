"""LoRA: adapters, merged weights, and what is frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.export import export
from chatgot.generate import generate
from chatgot.memory import predict
from chatgot.model.config import LoraConfig, ModelConfig
from chatgot.model.gpt import GPT
from chatgot.model.layers import is_adapter, merge_adapters
from chatgot.run.folder import RunFolder
from chatgot.run.weights import load_trained_at, read_initial
from chatgot.step.state import StepState
from chatgot.techniques.lora import Lora
from chatgot.testing import TINY, TechniqueSuite, last_state, opened, trained, verified_step
from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tiers import exhaustive


def adapted(**parts: Any) -> GPT:
    """Return a tiny model with adapters that matter."""
    sizes = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 8}
    model = GPT(ModelConfig(**{**sizes, "lora": LoraConfig(rank=2, alpha=3.0), **parts}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model.eval()


class TestLora(TechniqueSuite):
    technique = Lora
    variants = ({"rank": 4}, *exhaustive({"rank": 2, "alpha": 8.0, "targets": "attention"}))

    def break_on_purpose(self, run: StepState) -> None:
        """Let the update change a frozen weight."""
        update = run.operations.update

        def changed() -> None:
            update()
            run.model.norm.weight.data.add_(1e-3)

        run.operations.update = changed

    def test_adapters_that_do_not_move_are_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            for group in run.optimizers["adamw"].param_groups:
                group["params"] = group["params"][:-1]
            with pytest.raises(TechniqueNotActiveError, match="1 of 8 adapters were not"):
                verified_step(run)

    def test_only_adapters_have_states(self, data: Path) -> None:
        state = last_state(trained(self.config_with({"rank": 4}), data))
        adapters = [name for name in state["model"] if is_adapter(name)]
        assert len(state["optimizers"]["adamw"]["state"]) == len(adapters) == 2 * 2 * 4

    def test_weights_are_those_of_the_start(self, data: Path) -> None:
        config = self.config_with({"rank": 4})
        folder = trained(config, data)
        first = GPT(RunFolder(folder).record().config.model, generator=torch.Generator().manual_seed(config.loop.seed))
        for name, tensor in last_state(folder)["model"].items():
            assert torch.equal(tensor, first.state_dict()[name]) != is_adapter(name), name

    def test_a_run_with_adapters_is_a_start_with_merged_weights(self, data: Path) -> None:
        folder = trained(self.config_with({"rank": 4}), data)
        model, initial = load_trained_at(folder).model, read_initial(folder)
        assert not initial.config.lora.rank
        tokens = torch.arange(8).unsqueeze(0)
        ours = GPT(initial.config, values=initial.tensors).eval()
        torch.testing.assert_close(ours(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
@pytest.mark.parametrize("parts", [{}, {"n_heads": 4, "kv_heads": 2, "activation": "swiglu", "bias": True}])
def test_merged_weights_compute_the_same(parts: dict[str, Any], targets: Any) -> None:
    model = adapted(lora=LoraConfig(rank=2, alpha=3.0, targets=targets), **parts)
    state, config = merge_adapters(model.state_dict(), model.config)
    plain = GPT(config, values={name: each for name, each in state.items() if name != "head.weight"}).eval()
    tokens = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    assert model.config.parameter_count() == sum(each.numel() for each in model.parameters())
    assert config.parameter_count() < model.config.parameter_count()


def test_training_starts_with_the_outputs_of_frozen_weights_which_take_no_operations_for_a_gradient() -> None:
    sizes: dict[str, Any] = {"vocab_size": 11, "context_length": 8, "n_layers": 1, "n_heads": 2, "d_model": 8}
    plain = GPT(ModelConfig(**sizes))
    model = GPT(ModelConfig(**sizes, lora=LoraConfig(rank=2)), values=dict(plain.named_parameters()))
    tokens = torch.arange(8).unsqueeze(0)
    assert torch.equal(model(tokens), plain(tokens))
    assert all(each.requires_grad == is_adapter(name) for name, each in model.named_parameters())
    lora = ModelConfig(**sizes, lora=LoraConfig(rank=1))
    adapters = lora.parameter_count() - plain.config.parameter_count()
    attention = 12 * 8 * 8
    matmuls = (plain.config.flops_per_token() - attention) // 6
    assert lora.flops_per_token() == 4 * matmuls + 6 * adapters + attention


def test_export_adds_the_adapters_and_generation_uses_them(tmp_path: Path) -> None:
    llama: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
    model = adapted(**llama)
    export(model, model.config, tmp_path / "out")
    initial = read_initial(tmp_path / "out")
    again = GPT(initial.config, values=initial.tensors).eval()
    found = generate(again, [1, 2], max_new_tokens=6, temperature=0.0)
    assert torch.equal(found, generate(model, [1, 2], max_new_tokens=6, temperature=0.0))


def test_ledger_counts_gradients_and_states_of_adapters_only() -> None:
    config = TINY.changed({"model.vocab_size": 28, "techniques.lora.rank": 2})
    ledger, model = predict(config, device="cpu"), Lora(Lora.Settings(rank=2)).configure(config).model
    adapters = sum(each.numel() for name, each in GPT(model).named_parameters() if is_adapter(name))
    assert (ledger.gradients, ledger.optimizer) == (4 * adapters, 8 * adapters)
    assert ledger.parameters == 4 * model.parameter_count()


def test_adapters_without_the_technique_and_with_muon_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.lora\.rank is 4, and the technique lora is off"):
        TINY.changed({"model.lora.rank": 4})
    with pytest.raises(UsageError, match="'muon', which is for full matrices"):
        Lora(Lora.Settings()).configure(TINY.changed({"optim.name": "muon", "techniques.lora": "on"}))
