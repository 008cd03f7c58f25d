"""A padded vocabulary: the same losses, tokens and exports as without padding, and exact resumption."""

import json
from pathlib import Path

import pytest
import torch

from chatgot.config.recipes import get_recipe
from chatgot.export import export
from chatgot.generate import generate
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.run.folder import RunFolder
from chatgot.testing import TINY, opened, train_run, trained
from tensorkeep import load
from tiers import exhaustive
from tiny_training import check_same

PADDED = TINY.changed({"model.vocab_multiple": 128})
CONFIG = ModelConfig(vocab_size=16, vocab_padding=5, context_length=8, n_layers=1, n_heads=1, d_model=8, tied=False)


def test_vocabulary_is_rounded_up_when_a_run_is_opened(tmp_path: Path, data: Path) -> None:
    with opened(PADDED, tmp_path / "run", data) as run:
        model, tokens = run.config.model, run.dataset.vocab_size
        assert (model.vocab_size, model.n_tokens) == (128, tokens)
        assert run.model.tokens.weight.shape == (128, 32)
    assert RunFolder(tmp_path / "run").record().config.model.vocab_padding == 128 - tokens
    # Recipes for GPUs do so.
    for name, tokens, size in (("gpt2-124m", 50257, 50304), ("shakespeare-char-gpu", 65, 128)):
        assert get_recipe(name).model.with_tokens(tokens).vocab_size == size, name


def test_loss_gradients_and_samples_are_those_without_padding() -> None:
    model, tokens = GPT(CONFIG), torch.arange(9).view(1, 9)
    small = GPT(ModelConfig(vocab_size=11, context_length=8, n_layers=1, n_heads=1, d_model=8, tied=False))
    state = model.state_dict()
    small.load_state_dict({name: state[name][: len(each)] for name, each in small.state_dict().items()})
    assert model(tokens[:, :-1]).shape == (1, 8, 11)
    for each in (model, small):
        each.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert model.head.weight.grad is not None and small.head.weight.grad is not None
    torch.testing.assert_close(model.head.weight.grad[:11], small.head.weight.grad)
    assert not model.head.weight.grad[11:].any()
    texts = [generate(each, [1, 2], max_new_tokens=6, temperature=9.0, seed=1).tolist() for each in (model, small)]
    assert texts[0] == texts[1]
    # Padding that would win never does.
    with torch.no_grad():
        model.head.weight[11:] = 100 * model.features(torch.tensor([[1, 2]]))[0, -1]
    assert int(generate(model, [1, 2], max_new_tokens=1, temperature=0.0)[-1]) < 11


def test_padding_is_not_exported(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    export(model, CONFIG, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["vocab_size"] == 11
    tensors = load(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(tensors["transformer.wte.weight"], model.tokens.weight[:11])
    assert tensors["lm_head.weight"].shape == (11, 8)


@pytest.mark.parametrize(
    "techniques", [{"techniques.fused-cross-entropy": "on"}, *exhaustive({})], ids=["fused", "plain"]
)
def test_a_padded_run_resumes_exactly(tmp_path: Path, data: Path, techniques: dict[str, object]) -> None:
    config = PADDED.changed(techniques)
    whole = trained(config, data)
    train_run(config, tmp_path / "resumed", data, stop_after=3)
    train_run(RunFolder(tmp_path / "resumed").record().config, tmp_path / "resumed", data, resume=True)
    check_same(tmp_path / "resumed", whole, "train", "evaluate")


def test_runs_of_earlier_versions_resume_without_padding(tmp_path: Path, data: Path) -> None:
    config = TINY.changed({"model.vocab_size": 64})
    train_run(config, tmp_path / "run", data, stop_after=3)
    record = tmp_path / "run" / "run.json"
    kept = json.loads(record.read_text())
    del kept["config"]["model"]["vocab_padding"]
    record.write_text(json.dumps(kept))
    started = RunFolder(tmp_path / "run").record().config
    assert started.model.n_tokens == 64
    train_run(started, tmp_path / "run", data, resume=True)
