"""Sparse attention: which keys are visible, and that a cache chooses the same."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from chatgot.model import attention
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.step.state import StepState
from chatgot.techniques.experimental.sparse_attention import (
    SparseAttention,
    TopBlocks,
    _tiles,
    attend_to_tiles,
    choose_blocks,
    count_kept_pairs,
)
from chatgot.testing import TechniqueSuite, opened, verified_step, whole_run
from tensorkeep.errors import TechniqueNotActiveError
from tiers import exhaustive


def heads(length: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of 2 windows with 3 heads of size 8."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 2, 3, length, 8, generator=generator)
    return query, key, value


def sparse_model(**positions: Any) -> GPT:
    """Return a model with sparse attention in all blocks, in evaluation mode."""
    torch.manual_seed(1)
    model = GPT(ModelConfig(vocab_size=13, context_length=24, n_layers=2, n_heads=2, d_model=16, **positions)).eval()
    for block in model.blocks:
        block.attention.kernel = TopBlocks(4, 2)
    return model


class TestSparseAttention(TechniqueSuite):
    technique = SparseAttention
    variants = ({"block": 4, "keep": 2}, pytest.param({"block": 5, "keep": 1}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
        """Restore the kernel of one block."""
        run.model.blocks[1].attention.kernel = functional.scaled_dot_product_attention

    def test_kernel_that_keeps_too_much_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"block": 4, "keep": 2}), tmp_path / "run", data) as run:
            run.model.blocks[0].attention.kernel.keep = 3
            with pytest.raises(TechniqueNotActiveError, match="attention in 1 of 2 blocks did not attend to 2 blocks"):
                verified_step(run)

    def test_proof_has_the_density(self, data: Path) -> None:
        # 4 blocks of 4: 10 pairs within each, and one complete block before each of the last three.
        figures = whole_run(self.config_with(self.variants[0]), data).proofs["sparse-attention"].figures
        assert figures["density"] == (4 * 10 + 3 * 16) / (16 * 17 / 2)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 16, 21])
@pytest.mark.parametrize(("block", "keep"), [(4, 1), (4, 2), (4, 9), (5, 3), (1, 2), (32, 2)])
def test_number_of_pairs_is_as_computed(length: int, block: int, keep: int) -> None:
    query, key, _ = heads(length)
    visible = TopBlocks(block, keep).visible(query, key)
    assert (visible.sum((-1, -2)) == count_kept_pairs(length, block, keep)).all()


def test_later_positions_are_hidden_and_change_no_choice_and_the_own_and_the_best_blocks_are_visible() -> None:
    query, key, _ = heads(21)
    visible = TopBlocks(4, 2).visible(query, key)
    place = torch.arange(21)
    own = (place[:, None] // 4 == place // 4) & (place <= place[:, None])
    assert not visible[..., place > place[:, None]].any()
    assert visible[..., own].all()
    other_query, other_key, _ = heads(21, seed=1)
    kernel = TopBlocks(4, 3)
    before = kernel.visible(query, key)
    for cut in range(1, 21):
        mixed = [
            torch.cat((old[:, :, :cut], new[:, :, cut:]), 2) for old, new in ((query, other_query), (key, other_key))
        ]
        assert torch.equal(kernel.visible(*mixed)[:, :, :cut], before[:, :, :cut])
    # Keys of block n point along axis n; queries of the last block match blocks 2 and 0, in this order.
    key = torch.eye(8)[torch.arange(20) // 4].expand(1, 1, 20, 8)
    query = torch.tensor([1.0, 0, 2, 0, 9, 0, 0, 0]).expand(1, 1, 20, 8)
    last = TopBlocks(4, 3).visible(query, key)[0, 0, 19]
    assert last.view(5, 4).all(1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("length", [5, 16])
def test_with_all_blocks_it_is_full_attention(length: int) -> None:
    query, key, value = heads(length)
    full = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(TopBlocks(4, 4)(query, key, value, is_causal=True), full)


@pytest.mark.parametrize("positions", [{}, {"positions": "rotary"}])
@pytest.mark.parametrize("first", [1, 6, 9])
def test_cache_gives_the_same_result(first: int, positions: dict[str, str]) -> None:
    model = sparse_model(**positions)
    tokens = torch.randint(13, (2, 22), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(tokens)
        cache = model.new_cache(2)
        # The prompt, then a few tokens at once, then one after the other.
        cuts = [0, first, first + 5, *range(first + 6, 23)]
        parts = [model(tokens[:, begin:end], cache) for begin, end in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("length", [3, 16, 21, 70])
@pytest.mark.parametrize(("block", "keep"), [(4, 1), (4, 2), (4, 9), (5, 3), (1, 2), (32, 2)])
def test_gathered_blocks_equal_masked_attention(length: int, block: int, keep: int) -> None:
    """The same results, gradients and number of pairs as attention with the mask of all pairs."""
    inputs = [each.requires_grad_() for each in heads(length)]
    kernel = TopBlocks(block, keep)
    kernel.pairs = []
    found = kernel(*inputs, is_causal=True)
    gradients = torch.autograd.grad(found.square().sum(), inputs)
    visible = kernel.visible(*inputs[:2])
    expected = functional.scaled_dot_product_attention(*inputs, attn_mask=visible)
    torch.testing.assert_close(found, expected)
    for pair in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(*pair)
    assert torch.equal(kernel.pairs[0], visible.sum((-1, -2)))


def test_gradients_do_not_depend_on_the_order_of_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for _ in range(3):
            inputs = [each.requires_grad_() for each in heads(600)]
            TopBlocks(16, 4)(*inputs, is_causal=True).square().sum().backward()
            found.append([each.grad for each in inputs])
    finally:
        torch.set_num_threads(threads)
    for again in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], again, strict=True))


def test_dropout_leaves_the_mean_unchanged() -> None:
    query, key, value = heads(16)
    torch.manual_seed(3)
    query, key, value = query[:1], key[:1], value[:1]
    many = [each.expand(200, -1, -1, -1) for each in (query, key, value)]
    dropped = TopBlocks(4, 2)(*many, is_causal=True, dropout_p=0.3)
    whole = TopBlocks(4, 2)(query, key, value, is_causal=True)
    assert not torch.equal(dropped[:1], whole)
    torch.testing.assert_close(dropped.mean(0, keepdim=True), whole, atol=0.25, rtol=0)


def test_a_mask_of_documents_is_combined_with_the_choice() -> None:
    query, key, value = heads(16)
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
    mask[:, :, 9:, :9] = False
    kernel = TopBlocks(4, 2)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=kernel.visible(query, key) & mask)
    torch.testing.assert_close(kernel(query, key, value, attn_mask=mask), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("length", "block", "keep"),
    [
        (150, 48, 2),
        *exhaustive(*((100, 32, 2), (300, 200, 2), (384, 64, 3), (500, 48, 2), (384, 32, 2), (500, 200, 2))),
    ],
)
def test_tiles_of_flex_attention_equal_masked_attention(
    monkeypatch: pytest.MonkeyPatch, length: int, block: int, keep: int
) -> None:
    """Uncompiled, FlexAttention computes on a CPU, without gradients."""
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex_attention)
    query, key, value = (functional.pad(each, (0, 8)) for each in heads(length))
    kernel = TopBlocks(block, keep)
    found = attend_to_tiles(query, key, value, choose_blocks(query, key, block, keep - 1), block)
    visible = kernel.visible(query, key)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(query, key, value, attn_mask=visible))
    padded = (
        functional.pad(visible, (0, -length % 128, 0, -length % 128)).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    )
    assert torch.equal(_tiles(_kept_blocks(visible, block), block, length), padded.any(5).any(3))


def _kept_blocks(visible: torch.Tensor, block: int) -> torch.Tensor:
    """Return the blocks with a key that a query attends to."""
    return functional.pad(visible, (0, -visible.shape[-1] % block)).unflatten(-1, (-1, block)).any(-1)
