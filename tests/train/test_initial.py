"""Runs that start from weights: of another run or of a folder, what must fit, and exact resumption."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorkeep import CheckpointManager
from tensorkeep.errors import UsageError
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.data.tokenizers.known import tokenizer_at
from tensorkeep.train.export import export
from tensorkeep.train.initial import InitialWeights, read_initial
from tensorkeep.train.loop import train
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.trained import load_trained
from train.techniques.several_processes import group_of_one
from train.tiny_training import CONFIG, TEXT, Witness, last_state, lines, prepared, run

OTHER = CONFIG.changed({"model.n_layers": 2, "model.positions": "rotary", "loop.steps": 4, "loop.seed": 5})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return prepared(tmp_path)


@pytest.fixture
def source(tmp_path: Path, data: Path) -> Path:
    """Return a finished run of another model."""
    run(OTHER, tmp_path / "source", data)
    return tmp_path / "source"


def with_model(config: Config, initial: InitialWeights) -> Config:
    """Return a configuration with the settings of the model that weights decide."""
    settings = initial.model_settings(config)
    return config.changed({name: each for name, each in settings.items() if name.startswith("model.")})


def start(config: Config, initial: InitialWeights, folder: Path, data: Path, *, stop_at: int | None = None) -> None:
    """Train from weights."""
    config = with_model(config, initial)
    with open_run(config, RunFolder(folder), Dataset.open(data), initial=initial) as opened:
        train(opened, Witness(), stop=lambda: opened.progress.step == stop_at)


def test_a_run_starts_from_the_weights_of_another(tmp_path: Path, data: Path, source: Path) -> None:
    initial = read_initial(source)
    start(CONFIG, initial, tmp_path / "run", data, stop_at=1)
    first = CheckpointManager(tmp_path / "run" / "checkpoints").restore(0)
    expected = load_trained(RunFolder(source)).model.state_dict()
    assert difference(dict(first["model"]), dict(expected)) is None
    record = RunFolder(tmp_path / "run").record()
    assert record.config.model.n_layers == 2
    assert record.config.model.dropout == CONFIG.model.dropout
    assert record.initial == initial.record
    assert (initial.record.path, initial.record.kind, initial.record.step) == (str(source), "run", 4)


def test_a_step_can_be_chosen(tmp_path: Path, data: Path) -> None:
    run(OTHER.changed({"checkpoint.every": 2}), tmp_path / "source", data)
    second, last = read_initial(f"{tmp_path / 'source'}@2"), read_initial(tmp_path / "source")
    assert (second.record.step, last.record.step) == (2, 4)
    assert second.record.fingerprint != last.record.fingerprint


@pytest.mark.parametrize("technique", ["fsdp", "tensor-parallel", "pipeline-parallel"])
def test_sharded_models_start_from_the_same_weights(tmp_path: Path, data: Path, source: Path, technique: str) -> None:
    initial = read_initial(source)
    config = CONFIG.changed({f"techniques.{technique}": "on", "loop.batch_size": 4})
    with group_of_one():
        start(config, initial, tmp_path / "run", data, stop_at=1)
    first = CheckpointManager(tmp_path / "run" / "checkpoints").restore(0)["model"]
    for name, tensor in initial.tensors.items():
        assert torch.equal(first[name], tensor), name


@pytest.mark.parametrize("stopped", [1, 5])
def test_resumed_run_is_exact_and_does_not_need_the_source(
    tmp_path: Path, data: Path, source: Path, stopped: int
) -> None:
    initial = read_initial(source)
    start(CONFIG, initial, tmp_path / "whole", data)
    start(CONFIG, initial, tmp_path / "parts", data, stop_at=stopped)
    source.rename(tmp_path / "moved")
    if stopped == 1:
        # As after a kill before the first checkpoint of the loop.
        CheckpointManager(tmp_path / "parts" / "checkpoints").delete(1)
    run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", data, resume=True)
    assert lines(tmp_path / "parts", "train") == lines(tmp_path / "whole", "train")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


def test_export_and_start_gives_the_same_weights(tmp_path: Path, data: Path) -> None:
    llama = {"model.positions": "rotary", "model.norm": "rmsnorm", "model.activation": "swiglu", "model.kv_heads": 1}
    run(CONFIG.changed(llama), tmp_path / "source", data)
    trained = load_trained(RunFolder(tmp_path / "source"))
    export(trained.model, trained.model.config, tmp_path / "exported")
    start(CONFIG, read_initial(tmp_path / "exported"), tmp_path / "run", data, stop_at=1)
    first = CheckpointManager(tmp_path / "run" / "checkpoints").restore(0)["model"]
    assert difference(dict(first), dict(trained.model.state_dict())) is None


def test_a_shorter_context_takes_the_first_positions(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "source", data)
    initial = read_initial(tmp_path / "source")
    shorter = CONFIG.changed({"model.context_length": 8})
    assert initial.model_settings(shorter)["model.context_length"] == 8
    start(shorter, initial, tmp_path / "run", data, stop_at=1)
    first = CheckpointManager(tmp_path / "run" / "checkpoints").restore(0)["model"]
    assert torch.equal(first["positions.weight"], initial.tensors["positions.weight"][:8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.n_layers": 3}, r"model\.n_layers is 3, and the initial weights are of a model with 2"),
        ({"model.qk_norm": True}, r"model\.qk_norm is True, and the initial weights are of a model with False"),
        ({"techniques.activation-function.activation": "relu2"}, r"model\.activation is 'relu2'"),
    ],
)
def test_contradictions_are_refused_by_name(
    tmp_path: Path, data: Path, source: Path, changes: dict[str, Any], message: str
) -> None:
    initial = read_initial(source)
    config = with_model(CONFIG, initial).changed(changes)
    with (
        pytest.raises(UsageError, match=message),
        open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data), initial=initial),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_more_learned_positions_than_there_are_weights_for_are_refused(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "source", data)
    with pytest.raises(UsageError, match=r"context_length is 17, and the initial weights have 16 learned positions"):
        initial = read_initial(tmp_path / "source")
        initial.check(with_model(CONFIG, initial).changed({"model.context_length": 17}).model)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, source: Path) -> None:
    initial = read_initial(source)
    (tmp_path / "other.txt").write_text(TEXT.replace("t", "T"))
    prepare(tmp_path / "other.txt", tmp_path / "other", tokenizer="char")
    with pytest.raises(UsageError, match="is another one than that of the initial weights") as caught:
        initial.check_data(Dataset.open(tmp_path / "other"))
    assert f"--tokenizer from:{source}" in str(caught.value.remedy)
    prepare(tmp_path / "other.txt", tmp_path / "bytes", tokenizer="byte")
    with pytest.raises(UsageError, match="a vocabulary of 256 tokens, and the initial weights one of 28"):
        initial.check_data(Dataset.open(tmp_path / "bytes"))


def test_data_can_be_prepared_with_the_tokenizer_of_a_run(tmp_path: Path, source: Path) -> None:
    (tmp_path / "text.txt").write_text("the lazy fox; " * 20)
    made = prepare(tmp_path / "text.txt", tmp_path / "again", tokenizer=f"from:{source}")
    dataset = Dataset.open(made.path)
    assert dataset.vocab_size == 28
    read_initial(source).check_data(dataset)
    (tmp_path / "text.txt").write_text("THE LAZY FOX; " * 20)
    with pytest.raises(UsageError, match="'T'"):
        prepare(tmp_path / "text.txt", tmp_path / "upper", tokenizer=f"from:{source}")


def hugging_face_tokenizer(folder: Path) -> Any:
    """Write GPT-2's two files of a small vocabulary."""
    tokenizers = pytest.importorskip("tokenizers")
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE())
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    pipeline.train_from_iterator([TEXT], trainer=trainer)
    folder.mkdir(exist_ok=True)
    pipeline.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return pipeline


def test_the_two_files_of_gpt2_are_a_tokenizer(tmp_path: Path) -> None:
    theirs = hugging_face_tokenizer(tmp_path / "model")
    ours = tokenizer_at(tmp_path / "model")
    assert ours is not None
    text = "the quick <|endoftext|> brown fox \N{GRINNING FACE} jumps"
    assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text
    assert "".join(ours.decode_stream(ours.encode(text).tolist())) == text
    assert ours.end_of_document == ours.vocab_size - 1
    (tmp_path / "text.txt").write_text(TEXT)
    made = prepare(tmp_path / "text.txt", tmp_path / "data", tokenizer=f"from:{tmp_path / 'model'}")
    assert Dataset.open(made.path).tokenizer.digest == ours.digest


def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    from tensorkeep.errors import UnsupportedError

    tokenizers = pytest.importorskip("tokenizers")
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    pipeline.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="it is not byte-level"):
        tokenizer_at(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    with pytest.raises(UnsupportedError, match="has no token '</s>' to end a document"):
        tokenizer_at(tmp_path)
