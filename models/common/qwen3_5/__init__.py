"""What the dense Qwen3.5 and its mixtures of experts share: all but the MLP of a layer, and its names on disk."""
