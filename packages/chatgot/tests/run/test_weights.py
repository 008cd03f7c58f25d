"""Runs that start from weights: of another run or of a folder, what must fit, and exact resumption."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.data.tokenizers.registry import tokenizer_at
from chatgot.export import export
from chatgot.loop import train
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.run.weights import InitialWeights, load_trained_at, read_initial
from techniques.several_processes import group_of_one
from tensorkeep import CheckpointManager
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tiers import exhaustive
from tiny_training import CONFIG, TEXT, Trained, Witness, check_same, conversations, follow, run

OTHER = CONFIG.changed(
    {"model.n_layers": 2, "model.positions": "rotary", "loop.steps": 4, "loop.seed": 5, "checkpoint.every": 2}
)
TALK = 30 * [[("user", "the quick fox"), ("assistant", "jumps over the dog")], [("user", "lazy"), ("assistant", "dog")]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return a finished run of another model, with two checkpoints."""
    folder = tmp_path_factory.mktemp("source") / "source"
    run(OTHER, folder, data)
    return folder


def first_model(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run has started from."""
    return dict(CheckpointManager(folder / "checkpoints").restore(0)["model"])


def with_model(config: Config, initial: InitialWeights) -> Config:
    """Return a configuration with the settings of the model that weights decide."""
    settings = initial.model_settings(config)
    return config.changed({name: each for name, each in settings.items() if name.startswith("model.")})


def start(
    config: Config,
    initial: InitialWeights,
    folder: Path,
    data: Path,
    *,
    stop_at: int | None = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """Train a model from weights, with their settings but for some changes."""
    config = with_model(config, initial).changed(changes or {})
    with open_run(config, RunFolder(folder), Dataset.open(data), initial=initial) as opened:
        train(opened, Witness(), stop=lambda: opened.progress.step == stop_at)


def test_a_run_starts_from_the_weights_of_another_and_of_a_chosen_step(
    tmp_path: Path, data: Path, source: Path
) -> None:
    initial, second = read_initial(source), read_initial(f"{source}@2")
    start(CONFIG, initial, tmp_path / "run", data, stop_at=1)
    expected = load_trained_at(source).model.state_dict()
    assert difference(first_model(tmp_path / "run"), dict(expected)) is None
    record = RunFolder(tmp_path / "run").record()
    assert record.config.model.n_layers == 2
    assert record.config.model.dropout == CONFIG.model.dropout
    assert record.initial == initial.record
    assert (initial.record.path, initial.record.kind, initial.record.step) == (str(source), "run", 4)
    assert second.record.step == 2 and second.record.fingerprint != initial.record.fingerprint
    # The vocabulary is padded with zeros.
    start(CONFIG.changed({"model.vocab_multiple": 32}), initial, tmp_path / "padded", data, stop_at=1)
    first = first_model(tmp_path / "padded")["tokens.weight"]
    assert first.shape[0] == 32 and not first[28:].any() and first[:28].any()


@pytest.mark.integration
@pytest.mark.parametrize("technique", ["pipeline-parallel", *exhaustive("fsdp", "tensor-parallel")])
def test_sharded_models_start_from_the_same_weights(tmp_path: Path, data: Path, source: Path, technique: str) -> None:
    initial = read_initial(source)
    config = CONFIG.changed({f"techniques.{technique}": "on", "loop.batch_size": 4})
    with group_of_one():
        start(config, initial, tmp_path / "run", data, stop_at=1)
    first = first_model(tmp_path / "run")
    assert difference({name: first[name] for name in initial.tensors}, dict(initial.tensors)) is None


def test_resumed_run_is_exact_and_does_not_need_the_source(tmp_path: Path, data: Path, source: Path) -> None:
    gone = shutil.copytree(source, tmp_path / "source")
    initial = read_initial(gone)
    start(CONFIG, initial, tmp_path / "whole", data)
    for stopped in (1, 5):
        start(CONFIG, initial, tmp_path / str(stopped), data, stop_at=stopped)
    shutil.rmtree(gone)
    # As after a kill before the first checkpoint of the loop.
    CheckpointManager(tmp_path / "1" / "checkpoints").delete(1)
    for stopped in ("1", "5"):
        with case(stopped):
            run(RunFolder(tmp_path / stopped).record().config, tmp_path / stopped, data, resume=True)
            check_same(tmp_path / stopped, tmp_path / "whole", "train")
    # A run that has lost its initial weights does not resume.
    shutil.rmtree(tmp_path / "5" / "checkpoints")
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="which began with step 0") as raised:
        run(RunFolder(tmp_path / "5").record().config, tmp_path / "5", data, resume=True)
    assert "start again from the same weights (--init-from)" in str(raised.value.remedy)


def test_export_and_start_gives_the_same_weights(tmp_path: Path, data: Path) -> None:
    llama = {"model.positions": "rotary", "model.norm": "rmsnorm", "model.activation": "swiglu", "model.kv_heads": 1}
    run(CONFIG.changed(llama), tmp_path / "source", data)
    trained = load_trained_at(tmp_path / "source")
    export(trained.model, trained.model.config, tmp_path / "exported")
    start(CONFIG, read_initial(tmp_path / "exported"), tmp_path / "run", data, stop_at=1)
    assert difference(first_model(tmp_path / "run"), dict(trained.model.state_dict())) is None
    # The frequencies of rotary positions may be stored beside the weights.
    file = tmp_path / "exported" / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    tensorkeep.save({**tensorkeep.load(file), **extra}, file, overwrite=True)
    assert torch.equal(read_initial(tmp_path / "exported").tensors["tokens.weight"], trained.model.tokens.weight)


def test_learned_positions_are_cut_to_a_shorter_context_and_a_longer_one_is_refused(
    tmp_path: Path, data: Path, trained: Trained
) -> None:
    trained(CONFIG, tmp_path / "source")
    initial = read_initial(tmp_path / "source")
    with pytest.raises(UsageError, match=r"context_length is 17, and the initial weights have 16 learned positions"):
        initial.check(with_model(CONFIG, initial).changed({"model.context_length": 17}).model)
    shorter = CONFIG.changed({"model.context_length": 8})
    assert initial.model_settings(shorter)["model.context_length"] == 8
    start(shorter, initial, tmp_path / "run", data, stop_at=1)
    first = first_model(tmp_path / "run")
    assert torch.equal(first["positions.weight"], initial.tensors["positions.weight"][:8])


def test_contradictions_are_refused_by_name(tmp_path: Path, data: Path, source: Path) -> None:
    initial, talk = read_initial(source), conversations(tmp_path, TALK, f"from:{source}")
    for changes, place, message in (
        ({"model.n_layers": 3}, data, r"model\.n_layers is 3, and the initial weights are of a model with 2"),
        ({"model.qk_norm": True}, data, r"model\.qk_norm is True, and the initial weights are of a model with False"),
        ({"techniques.activation-function.activation": "relu2"}, data, r"model\.activation is 'relu2'"),
        # Adapters cannot learn them.
        ({"techniques.lora": "on"}, talk, "5 tokens of conversations are new to the initial weights"),
    ):
        with case(changes), pytest.raises(UsageError, match=message):
            start(CONFIG, initial, tmp_path / "run", place, changes=changes)
        assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_is_refused_and_can_be_prepared_with_that_of_a_run(
    tmp_path: Path, source: Path
) -> None:
    initial, text = read_initial(source), tmp_path / "text.txt"
    text.write_text(TEXT.replace("t", "T"))
    for tokenizer, message in (
        ("char", r"of the data is another one than token \d of the initial weights"),
        ("byte", "a vocabulary of 256 tokens, and the initial weights one of 28"),
    ):
        prepare(text, tmp_path / tokenizer, tokenizer=tokenizer)
        with case(tokenizer), pytest.raises(UsageError, match=message):
            initial.check_data(Dataset.open(tmp_path / tokenizer))
    with pytest.raises(UsageError, match=r"of the data is another one than token \d of the initial weights") as caught:
        initial.check_data(Dataset.open(conversations(tmp_path, TALK, "char")))
    with pytest.raises(UsageError, match="'T'"):
        prepare(text, tmp_path / "upper", tokenizer=f"from:{source}")
    text.write_text("the lazy fox; " * 20)
    follow(caught.value.remedy, SOURCE=text, NEW=tmp_path / "again")
    dataset = Dataset.open(tmp_path / "again")
    assert dataset.vocab_size == 28
    initial.check_data(dataset)


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


def test_the_two_files_of_gpt2_are_a_tokenizer_and_its_model_is_tuned_to_conversations(tmp_path: Path) -> None:
    theirs = hugging_face_tokenizer(tmp_path / "model")
    ours = tokenizer_at(tmp_path / "model")
    assert ours is not None
    text = "the quick <|endoftext|> brown fox \N{GRINNING FACE} jumps"
    assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text
    assert "".join(ours.decode_stream(ours.encode(text).tolist())) == text
    assert ours.end_of_document == ours.vocab_size - 1
    (tmp_path / "text.txt").write_text(TEXT)
    own = prepare(tmp_path / "text.txt", tmp_path / "own", tokenizer=f"from:{tmp_path / 'model'}").path
    assert Dataset.open(own).tokenizer.digest == ours.digest
    gpt2 = {"model.n_layers": 2, "model.activation": "gelu_tanh", "model.bias": True, "loop.steps": 1}
    run(CONFIG.changed(gpt2), tmp_path / "source", own)
    trained = load_trained_at(tmp_path / "source")
    export(trained.model, trained.model.config, tmp_path / "exported")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tmp_path / "model" / name, tmp_path / "exported")
    initial = read_initial(tmp_path / "exported")
    talk = Dataset.open(conversations(tmp_path, TALK, f"from:{tmp_path / 'exported'}"))
    start(CONFIG, initial, tmp_path / "run", talk.path, stop_at=1)
    first = first_model(tmp_path / "run")
    assert len(first["tokens.weight"]) == talk.vocab_size == initial.config.vocab_size + 4
    assert torch.equal(first["tokens.weight"][: initial.config.vocab_size], initial.tensors["tokens.weight"])
    # A token for padding, which was added to the tokenizer without a row in the embedding, and one of the text.
    padded = pytest.importorskip("tokenizers").Tokenizer.from_str(ours.hugging_face_json())
    padded.add_special_tokens(["[PAD]"])
    for added in ([], ["quick"]):
        padded.add_tokens(added)
        padded.save(str(tmp_path / "exported" / "tokenizer.json"))
        initial = read_initial(tmp_path / "exported")
        options = {"tokenizer": f"from:{tmp_path / 'exported'}", "overwrite": True}
        text = Dataset.open(prepare(tmp_path / "text.txt", tmp_path / "padded", **options).path)
        if not added:
            with open_run(with_model(CONFIG, initial), RunFolder(tmp_path / "pad"), text, initial=initial) as opened:
                assert opened.notes[-1].startswith("1 tokens of the tokenizer are new to the weights")
                assert opened.model.tokens.weight[-1].equal(initial.tensors["tokens.weight"].mean(0))
            start(CONFIG, initial, tmp_path / "lora", text.path, stop_at=1, changes={"techniques.lora": "on"})
    with pytest.raises(UsageError, match=f"token {ours.vocab_size + 1} of the tokenizer occurs in text"):
        initial.check_data(text)


def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path, data: Path, source: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = GPT(ModelConfig(vocab_size=9, context_length=8, n_layers=1, n_heads=1, d_model=4, activation="gelu_tanh"))
    folder = tmp_path / "exported"
    export(model, model.config, folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    for reason in ("its folder has none", "it is not byte-level"):
        if reason == "it is not byte-level":
            words.save(str(folder / "tokenizer.json"))
        initial = read_initial(folder)
        with pytest.raises(UsageError, match=rf"the tokenizer of the initial weights is not known: .*{reason}"):
            initial.check_source("text.txt", {})
        initial.check_source("text.txt", {"data.tokenizer"})
        initial.check_source(str(data), {})
    read_initial(source).check_source("text.txt", {})
    with pytest.raises(UnsupportedError, match="it is not byte-level"):
        tokenizer_at(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    with pytest.raises(UnsupportedError, match="has no token '</s>' to end a document"):
        tokenizer_at(folder)


def test_tokens_of_conversations_are_added_to_the_vocabulary(tmp_path: Path, trained: Trained) -> None:
    for tied in (True, False):
        folder = tmp_path / str(tied)
        trained(OTHER.changed({"model.tied": tied}), folder / "source")
        initial, talk = read_initial(folder / "source"), conversations(folder, TALK, f"from:{folder / 'source'}")
        old, new = 28, Dataset.open(talk).vocab_size
        assert new == old + 5
        config, known = with_model(CONFIG, initial), load_trained_at(folder / "source").model.state_dict()
        with open_run(config, RunFolder(folder / "run"), Dataset.open(talk), initial=initial) as opened:
            note = "5 tokens of conversations are new to the weights, and begin as the mean of all others"
            assert note in opened.notes
            for name in ("tokens.weight", "head.weight"):
                with case((tied, name)):
                    rows = opened.model.state_dict()[name]
                    assert rows.shape == (new, CONFIG.model.d_model)
                    assert torch.equal(rows[:old], known[name])
                    torch.testing.assert_close(rows[old:], known[name].mean(0).expand(new - old, -1))
            opened.model.eval()
            chances = opened.model(torch.arange(8).unsqueeze(0)).softmax(-1)
        # The new tokens are neither likely nor impossible.
        assert (chances[..., 28:] < 1 / 20).all() and (chances[..., 28:] > 1e-4).all(), tied


def test_tuning_to_conversations_resumes_exactly_and_can_be_tuned_again(tmp_path: Path, source: Path) -> None:
    config = CONFIG.changed({"model.vocab_multiple": 16})
    initial, talk = read_initial(source), conversations(tmp_path, TALK, f"from:{source}")
    start(config, initial, tmp_path / "whole", talk)
    start(config, initial, tmp_path / "parts", talk, stop_at=5)
    run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", talk, resume=True)
    check_same(tmp_path / "parts", tmp_path / "whole", "train")
    tuned = read_initial(tmp_path / "whole")
    assert not tuned.new_tokens(RunFolder(tmp_path / "whole").record().config.model)
    start(CONFIG, tuned, tmp_path / "again", talk, stop_at=1)
    first = first_model(tmp_path / "again")
    assert torch.equal(first["tokens.weight"], load_trained_at(tmp_path / "whole").model.tokens.weight)
