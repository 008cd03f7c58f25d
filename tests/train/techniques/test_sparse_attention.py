"""Sparse attention: which keys are visible, and that a cache chooses the same."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, opened, verified_step
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.sparse_attention import (
    SparseAttention,
    SparseAttentionSettings,
    TopBlocks,
    pairs_kept,
)


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
    variants = ({"block": 4, "keep": 2}, {"block": 5, "keep": 1})

    def break_on_purpose(self, run: Run) -> None:
        """Restore the kernel of one block."""
        run.model.blocks[1].attention.kernel = functional.scaled_dot_product_attention

    def test_kernel_that_keeps_too_much_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"block": 4, "keep": 2}), tmp_path / "run", data) as run:
            run.model.blocks[0].attention.kernel.keep = 3
            with pytest.raises(TechniqueNotActiveError, match="attention in 1 of 2 blocks did not attend to 2 blocks"):
                verified_step(run)

    def test_proof_has_the_density(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"block": 4, "keep": 2}), tmp_path / "run", data) as run:
            verified_step(run)
            # 4 blocks of 4: 10 pairs within each, and one complete block before each of the last three.
            assert run.techniques.proofs["sparse-attention"].figures["density"] == (4 * 10 + 3 * 16) / (16 * 17 / 2)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 16, 21])
@pytest.mark.parametrize(("block", "keep"), [(4, 1), (4, 2), (4, 9), (5, 3), (1, 2), (32, 2)])
def test_number_of_pairs_is_as_computed(length: int, block: int, keep: int) -> None:
    query, key, _ = heads(length)
    visible = TopBlocks(block, keep).visible(query, key)
    assert (visible.sum((-1, -2)) == pairs_kept(length, block, keep)).all()


def test_later_positions_are_hidden_and_the_own_block_is_visible() -> None:
    query, key, _ = heads(21)
    visible = TopBlocks(4, 2).visible(query, key)
    place = torch.arange(21)
    own = (place[:, None] // 4 == place // 4) & (place <= place[:, None])
    assert not visible[..., place > place[:, None]].any()
    assert visible[..., own].all()


def test_later_positions_do_not_change_the_choice() -> None:
    query, key, _ = heads(21)
    other_query, other_key, _ = heads(21, seed=1)
    kernel = TopBlocks(4, 3)
    before = kernel.visible(query, key)
    for cut in range(1, 21):
        mixed = [
            torch.cat((old[:, :, :cut], new[:, :, cut:]), 2) for old, new in ((query, other_query), (key, other_key))
        ]
        assert torch.equal(kernel.visible(*mixed)[:, :, :cut], before[:, :, :cut])


def test_best_matching_blocks_are_visible() -> None:
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


def test_gradients_equal_those_of_masked_attention() -> None:
    query, key, value = (each.requires_grad_() for each in heads(16))
    kernel = TopBlocks(4, 2)
    kernel(query, key, value, is_causal=True).square().sum().backward()
    found = [each.grad for each in (query, key, value)]
    again = [each.detach().requires_grad_() for each in (query, key, value)]
    mask = kernel.visible(*again[:2])
    functional.scaled_dot_product_attention(*again, attn_mask=mask).square().sum().backward()
    assert all(torch.equal(*pair) for pair in zip(found, [each.grad for each in again], strict=True))


def test_settings_that_keep_everything_are_refused() -> None:
    with pytest.raises(UsageError, match="4 blocks of 4 cover the whole context of 16"):
        SparseAttention(SparseAttentionSettings(block=4, keep=4)).configure(TINY)


@pytest.mark.parametrize("settings", [{"block": 0}, {"keep": 0}])
def test_settings_have_bounds(settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        SparseAttentionSettings(**settings)
