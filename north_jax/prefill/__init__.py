"""Prefill of packed prompts: several in one chunk of a few compiled sizes, layer by layer, over the paged KV cache."""
