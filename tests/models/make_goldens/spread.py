"""Random weights that hide nothing."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def spread(model: torch.nn.Module, seed: int) -> None:
    """Moves weights away from their initial values, where zeros, ones and smallness would hide errors.

    Much larger ones, or a smaller epsilon in the norms, would amplify float32 noise beyond what tests can tolerate.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(parameter.flatten()[0] + 0.3 * noise)
            else:
                parameter.copy_(0.6 * parameter[0].numel() ** -0.5 * noise)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter -= 3  # a memory of tens of tokens, not of one
        embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
        if embedding is not None and embedding.padding_idx is not None:
            embedding.weight[embedding.padding_idx] = 0
