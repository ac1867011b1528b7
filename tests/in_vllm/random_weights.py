"""A loader for vLLM that draws the weights of any model: `load_format="random_weights"`.

vLLM's own dummy weights are so small that the next token hardly depends on the attended tokens. These weights
are large. A weight follows from its name, so two engines give the same answers.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

RANDOM_WEIGHTS = "random_weights"

_GAIN = 2.0
"""The scale of weights. With this value, a layer's output is about as large as its input."""


@register_model_loader(RANDOM_WEIGHTS)
class RandomWeights(BaseModelLoader):
    """Draws each weight that is a floating point number."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: there is no file to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:  # noqa: ARG002
        """Fill the parameters in place."""
        is_gemma = type(model).__name__.startswith("Gemma")
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.data.copy_(_drawn(name, parameter.shape, is_gemma))


def _drawn(name: str, shape: torch.Size, is_gemma: bool) -> torch.Tensor:
    """Draw the weight with this name, in float32.

    is_gemma: Gemma multiplies its embeddings by the root of the width, and adds 1 to the weights of its
        norms.
    """
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    kind = name.rpartition(".")[2]
    if kind == "A_log":
        # How fast the channels of a state decay: some forget in a few tokens, some in a hundred.
        return torch.log(0.01 + drawn.abs())
    if kind == "A":
        return -0.01 - drawn.abs()
    if "norm" in name and kind == "weight" and len(shape) == 1:
        return torch.full(shape, 0.0 if is_gemma else 1.0)
    if len(shape) < 2:
        return 0.1 * drawn
    if "embed" in name or "wte" in name:
        return drawn * (shape[1] ** -0.5 / 4 if is_gemma else 1.0)
    return _GAIN / shape[-1] ** 0.5 * drawn
