"""How far the compiled decode is from JAX's, at full width: relative error of the logits of one step.

    python -m north_jax.bench.agreement --config config.json --layers 1 5 9 --context 100 8192 --out result.json

Weights and KV cache are random and rounded to bfloat16 once, so that bfloat16 and float32 run the same model. With many
layers, bfloat16 errors tip the router's choice between nearly equal experts, in JAX as in the compiled decode.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.config import Config
from north_jax.decoding import DecodeRow
from north_jax.inference import decode_step
from north_jax.kv_cache import KVCache, PageTables
from north_jax.layers import Params
from north_jax.megakernel.decoder import MegakernelDecoder
from north_jax.model import init_params
from north_jax.sampling import SamplingParams

from .decode import filled_cache
from .record import write

_jax_step = jax.jit(decode_step, static_argnums=0, donate_argnums=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and one step of a batch of equal rows."""

    config: Config
    rounded: Params  # bfloat16
    batch: int
    context: int

    def logits(self, dtype: Any, *, compiled: bool) -> np.ndarray:
        """float32 [batch, V] after one token, of weights and cache as `dtype`."""
        params = jax.tree.map(lambda a: a.astype(dtype), self.rounded)
        cache, tables = filled_cache(self.config, self.rounded, batch=self.batch, context=self.context, steps=1)
        cache = tuple(pages.astype(dtype) for pages in cache)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, self.batch).astype(np.int32)
        return (self._compiled if compiled else self._jax)(params, cache, tables, tokens)

    def _compiled(self, params: Params, cache: KVCache, tables: PageTables, tokens: np.ndarray) -> np.ndarray:
        decoder = MegakernelDecoder(self.config, params, slots=self.batch, max_context=self.context + 1)
        decoder.compile(cache, tables)
        greedy = SamplingParams(temperature=0)
        rows = [DecodeRow(i, int(token), self.context, 1, frozenset(), greedy) for i, token in enumerate(tokens)]
        decoder.decode(cache, tables, rows, 1, lambda _: None)
        return decoder.logits()

    def _jax(self, params: Params, cache: KVCache, tables: PageTables, tokens: np.ndarray) -> np.ndarray:
        starts, live = np.full(self.batch, self.context, np.int32), np.ones(self.batch, bool)
        return np.asarray(_jax_step(self.config, params, cache, tables, tokens, starts, live)[1])

    def measure(self) -> dict[str, Any]:
        """The largest relative error of a row, each against JAX in float32."""
        expected = self.logits(jnp.float32, compiled=False)

        def error(dtype: Any, *, compiled: bool) -> float:
            difference = self.logits(dtype, compiled=compiled) - expected
            return float((np.linalg.norm(difference, axis=1) / np.linalg.norm(expected, axis=1)).max())

        return {
            "kind": "agreement",
            "layers": self.config.num_hidden_layers,
            "batch": self.batch,
            "context": self.context,
            "megakernel_float32": error(jnp.float32, compiled=True),
            "megakernel_bfloat16": error(jnp.bfloat16, compiled=True),
            "jax_bfloat16": error(jnp.bfloat16, compiled=False),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the geometry")
    parser.add_argument("--layers", type=int, nargs="+", default=[5], help="(default: 5)")
    parser.add_argument("--batch", type=int, default=3, help="rows (default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="positions held (default: 1024)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    whole = Config.from_json(options.config)
    results = []
    for layers in options.layers:
        kinds = {name: getattr(whole, name)[:layers] for name in ("layer_types", "mlp_layer_types")}
        config = dataclasses.replace(whole, num_hidden_layers=layers, **kinds)
        rounded = init_params(config, jax.random.key(0), "bfloat16")
        for context in options.context:
            results.append(Case(config, rounded, options.batch, context).measure())
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if options.out is not None:
        write(options.out, results)


if __name__ == "__main__":
    main()
