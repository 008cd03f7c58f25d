"""Runs that start from weights: of another run or of a folder, what must fit, and exact resumption."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
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
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
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


@pytest.mark.parametrize("kind", ["none", "not byte-level"])
def test_text_is_not_tokenized_by_a_tokenizer_that_the_weights_do_not_know(
    tmp_path: Path, data: Path, source: Path, kind: str
) -> None:
    model = GPT(ModelConfig(vocab_size=9, context_length=8, n_layers=1, n_heads=1, d_model=4, activation="gelu_tanh"))
    export(model, model.config, tmp_path / "exported")
    if kind != "none":
        tokenizers = pytest.importorskip("tokenizers")
        other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
        other.save(str(tmp_path / "exported" / "tokenizer.json"))
    initial = read_initial(tmp_path / "exported")
    reason = "its folder has none" if kind == "none" else "it is not byte-level"
    with pytest.raises(UsageError, match=rf"the tokenizer of the initial weights is not known: .*{reason}"):
        initial.check_source("text.txt", {})
    initial.check_source("text.txt", {"data.tokenizer"})
    initial.check_source(str(data), {})
    read_initial(source).check_source("text.txt", {})


def test_frequencies_of_rotary_positions_may_be_stored_beside_the_weights(tmp_path: Path) -> None:
    parts = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    model = GPT(ModelConfig(vocab_size=9, context_length=8, n_layers=2, n_heads=1, d_model=4, **parts))
    export(model, model.config, tmp_path / "exported")
    file = tmp_path / "exported" / "model.safetensors"
    tensors = dict(tensorkeep.load(file))
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(2)}
    tensorkeep.save({**tensors, **extra}, file, overwrite=True)
    assert torch.equal(read_initial(tmp_path / "exported").tensors["tokens.weight"], model.tokens.weight)


TALK = [[("user", "the quick fox"), ("assistant", "jumps over the dog")], [("user", "lazy"), ("assistant", "dog")]]


def conversations(folder: Path, tokenizer: str, talk: list[list[tuple[str, str]]] = TALK) -> Path:
    """Prepare conversations."""
    found = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in talk * 30]
    (folder / "talk.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    return prepare(folder / "talk.jsonl", folder / "talk", tokenizer=tokenizer).path


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_of_conversations_are_added_to_the_vocabulary(tmp_path: Path, data: Path, tied: bool) -> None:
    run(OTHER.changed({"model.tied": tied}), tmp_path / "source", data)
    initial, talk = read_initial(tmp_path / "source"), conversations(tmp_path, f"from:{tmp_path / 'source'}")
    old, new = 28, Dataset.open(talk).vocab_size
    assert new == old + 5
    with open_run(
        with_model(CONFIG, initial), RunFolder(tmp_path / "run"), Dataset.open(talk), initial=initial
    ) as opened:
        assert (
            opened.notes[-1] == "5 tokens of conversations are new to the weights, and begin as the mean of all others"
        )
        for name in ("tokens.weight", "head.weight"):
            rows, known = (
                opened.model.state_dict()[name],
                load_trained(RunFolder(tmp_path / "source")).model.state_dict(),
            )
            assert rows.shape == (new, CONFIG.model.d_model)
            assert torch.equal(rows[:old], known[name])
            torch.testing.assert_close(rows[old:], known[name].mean(0).expand(new - old, -1))


def test_new_tokens_are_neither_likely_nor_impossible(tmp_path: Path, data: Path, source: Path) -> None:
    initial, talk = read_initial(source), conversations(tmp_path, f"from:{source}")
    with open_run(
        with_model(CONFIG, initial), RunFolder(tmp_path / "run"), Dataset.open(talk), initial=initial
    ) as opened:
        opened.model.eval()
        chances = opened.model(torch.arange(8).unsqueeze(0)).softmax(-1)
    assert (chances[..., 28:] < 1 / 20).all() and (chances[..., 28:] > 1e-4).all()


def test_tuning_to_conversations_resumes_exactly_and_can_be_tuned_again(
    tmp_path: Path, data: Path, source: Path
) -> None:
    config = CONFIG.changed({"model.vocab_multiple": 16})
    initial, talk = read_initial(source), conversations(tmp_path, f"from:{source}")
    start(config, initial, tmp_path / "whole", talk)
    start(config, initial, tmp_path / "parts", talk, stop_at=5)
    run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", talk, resume=True)
    assert lines(tmp_path / "parts", "train") == lines(tmp_path / "whole", "train")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None
    tuned = read_initial(tmp_path / "whole")
    assert not tuned.new_tokens(RunFolder(tmp_path / "whole").record().config.model)
    start(CONFIG, tuned, tmp_path / "again", talk, stop_at=1)
    first = CheckpointManager(tmp_path / "again" / "checkpoints").restore(0)["model"]
    assert torch.equal(first["tokens.weight"], load_trained(RunFolder(tmp_path / "whole")).model.tokens.weight)


def test_a_hugging_face_model_is_tuned_to_conversations(tmp_path: Path, data: Path) -> None:
    hugging_face_tokenizer(tmp_path / "model")
    own = prepare(tmp_path / "text.txt", tmp_path / "own", tokenizer=f"from:{tmp_path / 'model'}").path
    gpt2 = {"model.n_layers": 2, "model.activation": "gelu_tanh", "model.bias": True, "loop.steps": 1}
    run(CONFIG.changed(gpt2), tmp_path / "source", own)
    trained = load_trained(RunFolder(tmp_path / "source"))
    export(trained.model, trained.model.config, tmp_path / "exported")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tmp_path / "model" / name, tmp_path / "exported")
    initial = read_initial(tmp_path / "exported")
    talk = Dataset.open(conversations(tmp_path, f"from:{tmp_path / 'exported'}"))
    start(CONFIG, initial, tmp_path / "run", talk.path, stop_at=1)
    first = CheckpointManager(tmp_path / "run" / "checkpoints").restore(0)["model"]
    assert len(first["tokens.weight"]) == talk.vocab_size == initial.config.vocab_size + 4
    assert torch.equal(first["tokens.weight"][: initial.config.vocab_size], initial.tensors["tokens.weight"])


def test_vocabulary_is_padded_with_zeros(tmp_path: Path, data: Path, source: Path) -> None:
    start(CONFIG.changed({"model.vocab_multiple": 32}), read_initial(source), tmp_path / "run", data, stop_at=1)
    first = CheckpointManager(tmp_path / "run" / "checkpoints").restore(0)["model"]["tokens.weight"]
    assert first.shape[0] == 32 and not first[28:].any() and first[:28].any()


def test_adapters_cannot_learn_new_tokens(tmp_path: Path, data: Path, source: Path) -> None:
    initial, talk = read_initial(source), conversations(tmp_path, f"from:{source}")
    config = with_model(CONFIG, initial).changed({"techniques.lora": "on"})
    with (
        pytest.raises(UsageError, match="5 tokens of conversations are new to the initial weights"),
        open_run(config, RunFolder(tmp_path / "run"), Dataset.open(talk), initial=initial),
    ):
        pass


def test_conversations_in_another_text_are_refused(tmp_path: Path, data: Path, source: Path) -> None:
    talk = conversations(tmp_path, "char")
    with pytest.raises(UsageError, match="is another one than that of the initial weights"):
        read_initial(source).check_data(Dataset.open(talk))


def test_a_run_that_has_lost_its_initial_weights_does_not_resume(tmp_path: Path, data: Path, source: Path) -> None:
    start(CONFIG, read_initial(source), tmp_path / "tuned", data, stop_at=3)
    shutil.rmtree(tmp_path / "tuned" / "checkpoints")
    config = RunFolder(tmp_path / "tuned").record().config
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="which began with step 0") as raised:
        run(config, tmp_path / "tuned", data, resume=True)
    assert "start again from the same weights (--init-from)" in str(raised.value.remedy)
