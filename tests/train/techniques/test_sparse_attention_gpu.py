"""Sparse attention on a GPU: FlexAttention, compiled, against attention with a mask of all pairs."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tensorkeep.train.techniques.sparse_attention import TopBlocks, pairs_kept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize(("block", "keep"), [(64, 4), (128, 2), (48, 3)])
def test_compiled_tiles_equal_the_mask(block: int, keep: int) -> None:
    generator = torch.Generator().manual_seed(block)
    kernel = TopBlocks(block, keep)
    kernel.pairs = []
    inputs = torch.randn(3, 2, 4, 2048, 64, generator=generator).cuda().requires_grad_()
    query, key, value = inputs
    expected = scaled_dot_product_attention(query, key, value, attn_mask=kernel.visible(query, key))
    found = kernel(query, key, value, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(each.square().sum(), inputs, retain_graph=True)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    assert (kernel.pairs[0] == pairs_kept(2048, block, keep)).all()
