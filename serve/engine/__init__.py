"""The engine: continuous batching of token requests over jitted prefill and decode."""
