"""Masked documents on a GPU: FlexAttention, compiled, against the dense mask."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from chatgot.model.attention import attend_within, dense_mask, document_numbers, tiled_mask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("length", [256, 1000, 2048])
def test_compiled_tiles_equal_the_dense_mask(length: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(length)
    for _ in range(3):
        tokens = torch.randint(200, (2, length), generator=generator).cuda()
        documents = document_numbers(tokens, 0)
        inputs = torch.randn(3, 2, 4, length, 64, generator=generator).cuda().requires_grad_()
        expected = scaled_dot_product_attention(*inputs, attn_mask=dense_mask(documents, length))
        found = attend_within(*inputs, tiled_mask(documents))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        gradients = [torch.autograd.grad(each.square().sum(), inputs)[0] for each in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
