"""Normalisation of the residual stream: LayerNorm or RMSNorm, computed by torch."""

from __future__ import annotations

from torch import nn

from tensorkeep.train.model.config import ModelConfig


def build_norm(config: ModelConfig) -> nn.Module:
    """Return a new norm over the last dimension, of d_model elements, as the configuration asks for."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
