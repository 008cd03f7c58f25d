"""Attention within documents: what is visible, equal results by every path, and runs that resume exactly."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.model import attention
from chatgot.model.attention import dense_mask, document_numbers, tiled_mask
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.run.folder import RunFolder
from chatgot.run.weights import load_trained_at
from chatgot.step.train_step import evaluate, take_step
from chatgot.testing import TINY, losses, opened, train_run, trained
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case
from tiers import exhaustive
from tiny_training import check_same

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

END = 0
TOKENS = torch.tensor([[3, 4, 5, END, 6, 7, 3, END, END, 8, 9, 3], [END, 3, 3, 4, 5, 6, 7, 8, 9, 1, 2, END]])


def model(**changes: Any) -> GPT:
    config = ModelConfig(vocab_size=10, context_length=12, n_layers=2, n_heads=2, d_model=16, **changes)
    made = GPT(config, generator=torch.Generator().manual_seed(0)).eval()
    made.document_end = END
    return made


def test_the_end_of_a_document_begins_the_next_one_which_rotary_models_see_as_if_it_were_alone() -> None:
    assert document_numbers(TOKENS, END).tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2],
    ]
    visible = dense_mask(document_numbers(TOKENS, END), 12)[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in visible[2:9]]
    assert seen == [[0, 1, 2], [3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [7], [8]]
    masked = model(positions="rotary")
    logits = masked(TOKENS)
    for begin, end in itertools.pairwise([0, 3, 7, 8, 12]):
        torch.testing.assert_close(logits[:1, begin:end], masked(TOKENS[:1, begin:end]))
    masked.document_end = None
    assert not torch.allclose(masked(TOKENS)[0, 4:], logits[0, 4:])


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary"}, {"kv_heads": 1}])
def test_other_documents_change_nothing(changes: dict[str, Any]) -> None:
    masked = model(**changes)
    other = TOKENS.clone()
    other[0, :3], other[0, 9:] = 1, 2
    assert torch.equal(masked(other)[0, 3:9], masked(TOKENS)[0, 3:9])
    # The head is tied, so compare with the gradient of the document without the one before.
    targets = torch.tensor([[-1, -1, -1, 6, 7, 3, -1, -1]])
    losses = [masked.loss(tokens[:1, :8], targets) for tokens in (TOKENS, other)]
    gradient, alone = (torch.autograd.grad(loss, masked.tokens.weight)[0] for loss in losses)
    assert torch.equal(gradient, alone)


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary"}])
@pytest.mark.parametrize("first", [1, 4, 9])
def test_cache_gives_the_same_result(first: int, changes: dict[str, Any]) -> None:
    masked = model(**changes)
    with torch.no_grad():
        whole = masked(TOKENS)
        cache = masked.new_cache(2)
        for _ in range(2):
            cuts = [0, first, first + 2, *range(first + 3, 13)]
            parts = [masked(TOKENS[:, begin:end], cache) for begin, end in itertools.pairwise(cuts)]
            torch.testing.assert_close(torch.cat(parts, 1), whole)
            cache.clear()


@pytest.mark.parametrize("length", [300, *exhaustive(20, 128, 512)])
def test_tiles_hide_the_same_pairs(length: int) -> None:
    """FlexAttention without compilation computes with a mask on any device."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(60, (2, length), generator=generator)
    documents = document_numbers(tokens, END)
    query, key, value = torch.randn(3, 2, 2, length, 16, generator=generator)
    dense, mask = dense_mask(documents, length), tiled_mask(documents)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=dense)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected)
    tiles = torch.nn.functional.pad(dense[:, 0], (0, -length % 128, 0, -length % 128))
    tiles = tiles.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).any(4).any(2)
    assert torch.equal(mask.to_dense()[:, 0].bool(), tiles)
    # Long documents leave the tiles between them out.
    tokens = torch.ones(1, 1024, dtype=torch.int64)
    tokens[0, ::256] = END
    assert tiled_mask(document_numbers(tokens, END)).to_dense().sum() == 4 * 3


@torch.no_grad()
def test_tiles_reach_the_attention_of_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for a tensor on a GPU and for compiled code."""
    calls = []

    def flex(*inputs: torch.Tensor, block_mask: Any, enable_gqa: bool) -> torch.Tensor:
        calls.append(block_mask)
        return flex_attention(*inputs, block_mask=block_mask, enable_gqa=enable_gqa)

    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex)
    masked = model()
    expected = masked(TOKENS)
    mask = tiled_mask(document_numbers(TOKENS, END))
    monkeypatch.setattr(masked, "mask", lambda tokens, cache: mask)
    torch.testing.assert_close(masked(TOKENS), expected)
    assert calls == [mask] * 2


CONFIG = TINY.changed({"data.mask_documents": True, "model.context_length": 48, "eval.every": 3})


@pytest.mark.parametrize("changes", [*exhaustive({}), {"techniques.activation-checkpointing": "on"}])
def test_a_run_is_resumed_exactly(tmp_path: Path, documents: Path, changes: dict[str, object]) -> None:
    config = CONFIG.changed(changes)
    whole = trained(config, documents)
    train_run(config, tmp_path / "parts", documents, stop_after=3)
    train_run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", documents, resume=True)
    check_same(tmp_path / "parts", whole, "train", "evaluate")
    with pytest.raises(UsageError, match=r"data\.mask_documents: True then, False now"):
        train_run(config.changed({"data.mask_documents": False}), tmp_path / "parts", documents, resume=True)


def test_the_mask_changes_training_and_is_that_of_the_trained_model(documents: Path) -> None:
    ends = {True: Dataset.open(documents).tokenizer.end_of_document, False: None}
    folders = {masks: trained(CONFIG.changed({"data.mask_documents": masks}), documents) for masks in ends}
    for masks, folder in folders.items():
        assert load_trained_at(folder, device="cpu").model.document_end == ends[masks]
    assert losses(folders[True]) != losses(folders[False])


def test_evaluation_is_masked(tmp_path: Path, documents: Path) -> None:
    with opened(CONFIG, tmp_path / "run", documents) as run:
        take_step(run)
        tokens = torch.from_numpy(run.dataset.validation[:97].astype("int64"))
        # No document is as long as two windows.
        batch = tokens[:-1].view(2, 48), tokens[1:].view(2, 48)
        masked = evaluate(run.model, [batch])
        run.model.document_end = None
        assert evaluate(run.model, [batch]) != masked


def test_what_would_pass_between_documents_and_a_stream_are_refused(tmp_path: Path, documents: Path) -> None:
    (tmp_path / "a.txt").write_text("one stream " * 200)
    refused: list[tuple[Path, dict[str, object], str]] = [
        (documents, {"techniques.attention-kernel.kernel": "math"}, "attention-kernel is on: masked documents need"),
        (documents, {"techniques.sparse-attention.block": 8}, "sparse-attention is on: its activity check"),
        (documents, {"model.token_shift": True}, r"model\.token_shift passes features from a document"),
        (documents, {"model.convolution": 3}, r"model\.convolution passes features from a document"),
        (prepare(tmp_path / "a.txt", tmp_path / "data").path, {}, "the text is one stream without documents"),
    ]
    for number, (data, changes, message) in enumerate(refused):
        with case(message), pytest.raises(UsageError, match=message):
            train_run(CONFIG.changed({"model.dropout": 0.0, **changes}), tmp_path / str(number), data)
