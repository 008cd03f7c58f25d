"""Mixtures: what a weight means, equal batches after a resume, the validation split, and refusals."""

from fractions import Fraction
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatgot.data.batches import Batches, MixedOffsets
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import absolute_source, parse_mixture, prepare
from chatgot.run.data import open_data
from chatgot.run.folder import RunFolder
from chatgot.testing import TINY, last_state, losses, train_run
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 10**7), st.integers(1, 60))
def test_each_part_has_its_fraction_of_the_windows_at_any_time(weights: list[float], begin: int, count: int) -> None:
    offsets = MixedOffsets([(100, each) for each in weights], 4, 0, "random")
    counts = offsets.counts(begin, begin + count)
    assert (counts.sum(axis=0) == np.arange(begin, begin + count + 1)).all()
    # Each window is of one part.
    steps = np.diff(counts)
    assert ((steps == 0) | (steps == 1)).all()
    for found, weight in zip(counts[:, 0], weights, strict=True):
        assert abs(found - begin * weight / sum(weights)) <= len(weights)


@given(st.sampled_from(["random", "shuffled"]), st.integers(0, 500), st.integers(1, 40))
def test_batches_of_a_mixture_do_not_depend_on_earlier_ones(order: str, position: int, batch_size: int) -> None:
    tokens = np.concatenate([np.zeros(90), np.ones(300), np.full(41, 2)]).astype(np.uint16)
    mixture = [(90, 0.5), (300, 0.3), (41, 0.2)]
    made = [
        Batches(tokens, context_length=8, batch_size=batch_size, seed=3, order=order, mixture=mixture)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    for number in range(max(0, position - 3), position):
        made[0].at(number)
    inputs, targets = made[0].at(position)
    assert (inputs == made[1].at(position)[0]).all()
    # No window is in two parts.
    assert ((inputs.amin(1) == inputs.amax(1)) & (inputs == targets).all(1)).all()


def test_standard_input_is_refused_where_it_would_be_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tmp_path)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO(b"text of standard input; " * 99)))
    mixture = f"{tmp_path}/a.txt:0.5,-:0.5"
    with pytest.raises(UsageError, match="-: standard input can be read once") as caught:
        prepare(mixture, tmp_path / "learned", tokenizer="char")
    assert "--tokenizer byte" in str(caught.value.remedy)
    assert not (tmp_path / "learned").exists()
    found = Dataset.open(prepare(mixture, tmp_path / "bytes", tokenizer="byte").path)
    assert "text of standard input" in found.tokenizer.decode(found.train)


def test_the_windows_have_the_weights_and_their_counts_are_exact_beyond_64_bits() -> None:
    tokens = np.concatenate([np.zeros(50), np.ones(5000)]).astype(np.uint16)
    batches = Batches(tokens, context_length=4, batch_size=10, seed=0, mixture=[(50, 0.7), (5000, 0.3)])
    assert [int((next(batches)[0][:, 0] == 0).sum()) for _ in range(5)] == [7, 7, 7, 7, 7]
    # The smallest weight is a billionth.
    assert MixedOffsets([(100, 1.0), (100, 2e-9)], 4, 0, "random").counts(10**9, 10**9).tolist() == [[10**9 - 2], [2]]
    with pytest.raises(UsageError, match="the weight of part 2 is 1e-12"):
        MixedOffsets([(100, 1.0), (100, 1e-12)], 4, 0, "random")
    weights, begin = [0.7, 1 / 3, 1e-8], 10**24 + 7
    exact = [Fraction(each).limit_denominator(1 << 32) for each in weights]
    first = int(begin * exact[0] / sum(exact))
    second = int((begin - first) * exact[1] / (exact[1] + exact[2]))
    found = MixedOffsets([(100, each) for each in weights], 4, 0, "random").counts(begin, begin)
    assert found.tolist() == [[first], [second], [begin - first - second]]


def texts(folder: Path) -> None:
    (folder / "a.txt").write_text("the first text " * 300)
    (folder / "b.jsonl").write_text("\n".join(f'{{"text": "another line {number}"}}' for number in range(400)))


def test_sources_are_prepared_together_and_the_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    texts(tmp_path)
    made, *others = (
        prepare(f"{tmp_path}/a.txt:{a},{tmp_path}/b.jsonl:{b}", tmp_path / f"data{number}", tokenizer="char")
        for number, (a, b) in enumerate(((3, 1), (3, 1), (6, 2), (1, 2)))
    )
    dataset = Dataset.open(made.path, verify=True)
    assert sorted(entry.name for entry in made.path.iterdir()) == ["data.json", "train.bin", "validation.bin"]
    assert [part["weight"] for part in made.description["mixture"]] == [0.75, 0.25]
    assert [tokens for tokens, _ in dataset.mixture] == [4050, len(dataset.train) - 4050]
    assert dataset.tokenizer.decode(dataset.train[:15]) == "the first text "
    assert "another line" in dataset.tokenizer.decode(dataset.train[4050:4100])
    # The validation split has the same proportions.
    first = dataset.tokenizer.decode(dataset.validation).index("another")
    assert first == pytest.approx(0.75 * len(dataset.validation), abs=2)
    same, scaled, different = (Dataset.open(each.path).fingerprint for each in others)
    assert dataset.fingerprint == same == scaled != different


def test_prepared_data_is_taken_with_its_tokenizer(tmp_path: Path) -> None:
    texts(tmp_path)
    prepare(tmp_path / "b.jsonl", tmp_path / "a", tokenizer="byte")
    mixed = prepare(f"{tmp_path}/a:0.5,{tmp_path}/a.txt:0.5", tmp_path / "mixed", tokenizer="char")
    assert mixed.description["tokenizer"] == "byte"
    prepare(tmp_path / "b.jsonl", tmp_path / "b", tokenizer="char")
    with pytest.raises(UsageError, match=r"b: was prepared with other tokens \(char\) than .*a \(byte\)"):
        prepare(f"{tmp_path}/a:0.5,{tmp_path}/b:0.5", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    prepare(tmp_path / "b.jsonl", tmp_path / "c", tokenizer=f"from:{tmp_path}/a")
    assert Dataset.open(tmp_path / "c").tokenizer.digest == Dataset.open(tmp_path / "a").tokenizer.digest
    prepare(tmp_path / "a.txt", tmp_path / "stream", tokenizer="byte")
    with pytest.raises(UsageError, match=r"b\.jsonl: consists of documents, and the tokenizer \(byte\) has no token"):
        prepare(tmp_path / "b.jsonl", tmp_path / "d", tokenizer=f"from:{tmp_path}/stream")


def test_a_mixture_of_mixtures_is_refused_with_the_weights_of_the_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts(tmp_path)
    a, b = tmp_path / "a.txt", tmp_path / "b.jsonl"
    prepare(f"{a}:3,{b}:1", tmp_path / "inner")
    with pytest.raises(UsageError, match="inner: is a mixture itself") as caught:
        prepare(f"{tmp_path}/inner:2,{a}:1", tmp_path / "outer")
    assert caught.value.remedy == f"mix its sources: {a}:2.5,{b}:0.5"
    assert not (tmp_path / "outer").exists()
    assert Dataset.open(prepare(caught.value.remedy.partition(": ")[2], tmp_path / "outer").path).mixture
    assert "validation tokens that are left out, to keep the weights: " in capsys.readouterr().err


@pytest.mark.parametrize("order", [pytest.param("random", marks=pytest.mark.exhaustive), "shuffled"])
def test_a_run_on_a_mixture_is_resumed_exactly(tmp_path: Path, order: str) -> None:
    texts(tmp_path)
    source = f"{tmp_path}/a.txt:0.6,{tmp_path}/b.jsonl:0.4"
    config = TINY.changed(
        {"data.source": source, "data.order": order, "eval.every": 0, "loop.gradient_accumulation_steps": 1}
    )
    data = open_data(config, RunFolder(tmp_path / "whole")).path
    train_run(config, tmp_path / "whole", data)
    again = open_data(config, RunFolder(tmp_path / "parts")).path
    train_run(config, tmp_path / "parts", again, stop_after=3)
    found = open_data(config, RunFolder(tmp_path / "parts"), resume=True)
    assert found.path == again
    train_run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", found.path, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


def test_names_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts(tmp_path)
    (tmp_path / "odd:1").write_text("a single file")
    for name in ("stdlib", "-"):
        Path(name).touch()
    found = [absolute_source(name) for name in ("a.txt:0.5,stdlib:2", "a.txt", "nothing", "stdlib", "-")]
    assert found == [f"{tmp_path}/a.txt:0.5,stdlib:2.0", f"{tmp_path}/a.txt", "nothing", "stdlib", "-"]
    assert parse_mixture("odd:1") == parse_mixture(tmp_path / "a.txt") == {}


def test_malformed_mixtures_short_sources_and_techniques_that_sort_documents_are_refused(tmp_path: Path) -> None:
    for spec, message in (
        ("a:0.5,b", "'b' has no weight, in a mixture of several sources"),
        ("a:0.5,b:0", "'b:0' needs a name and a weight above 0"),
        ("a:0.5,b:nan", "needs a name and a weight above 0"),
        ("a:0.5,a:0.5", "'a:0.5' is named twice"),
        (":0.5,a:1", "needs a name"),
        ("a:1,b:1e-12", "the weight of b is 1e-12 of 1 in all, and the smallest is a billionth"),
        ("a:1e308,b:1e308", "the weight of a is 1e.308 of inf"),
    ):
        with case(spec), pytest.raises(UsageError, match=message):
            prepare(spec, tmp_path / "data")
    texts(tmp_path)
    (tmp_path / "short.txt").write_text("a b c d e " * 3)
    made = prepare(f"{tmp_path}/a.txt:1,{tmp_path}/short.txt:1", tmp_path / "data", validation=0.5)
    with pytest.raises(UsageError, match=r"part 2 of the mixture has 15 tokens"):
        train_run(TINY, tmp_path / "run", made.path)
    made = prepare(f"{tmp_path}/b.jsonl:1,{tmp_path}/a.txt:1", tmp_path / "sorted")
    with pytest.raises((UsageError, UnsupportedError), match="the data is a mixture"):
        train_run(TINY.changed({"techniques.length-curriculum": "on"}), tmp_path / "run", made.path)
