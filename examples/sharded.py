"""One model on several devices: weights read straight into their parts, a prompt prefilled, its answer decoded.

    python -m examples.sharded --cpu-devices 8 --data 2 --tensor 2 --expert 2
    python -m examples.sharded --model DIR --tensor 2

On several hosts, each runs the same command with its own number, and all of them name host 0:

    python -m examples.sharded --model DIR --expert 2 --tensor 8 --coordinator host0:1234 --hosts 2 --host 0

docs/scaling.md says which axis is for what.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import north_jax
from north_jax.checkpoint.loader import resolve
from north_jax.kv_cache import PagedRows, pages_for
from north_jax.sharding import init_sharded_cache, joined_tables, make_mesh, shardings_of

PROMPT = "def add(a, b):\n"


def main(arguments: list[str] | None = None) -> list[str]:
    """Prints where weights are, and what each row says; gives the latter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="north-nano", help="checkpoint directory (default: %(default)s)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--new-tokens", type=int, default=16)
    for axis in ("data", "tensor", "expert"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="devices along this axis")
    parser.add_argument("--cpu-devices", type=int, help="pretend to have so many devices on a CPU")
    parser.add_argument("--coordinator", help="host 0 and a port")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--host", type=int)
    options = parser.parse_args(arguments)
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.hosts, options.host)

    mesh = make_mesh(data=options.data, tensor=options.tensor, expert=options.expert)
    config = north_jax.Config.from_json(resolve(options.model))
    model = north_jax.load(options.model, shardings=shardings_of(config, mesh))
    for name in ("qkv", "o"):
        print(name, part(model.params["layers"][1][name]))
    print("experts' gate_up", part(model.params["layers"][1]["mlp"]["gate_up"]))

    tokenizer = model.tokenizer()
    prompt = np.array([tokenizer.bos_id, *tokenizer.encode_text(options.prompt)], np.int32)
    end = len(prompt) + options.new_tokens
    pages = pages_for(end)
    counts = {"full_pages": pages, "sliding_pages": pages}
    # A row in each part of `data`, all of the same prompt here.
    parts = [PagedRows(config, rows=1, max_context=end, max_chunk=end, **counts) for _ in range(options.data)]
    for rows in parts:
        rows.grow(0, 0, end)
    tables = joined_tables([rows.snapshot() for rows in parts], **counts)
    total = {name: count * options.data for name, count in counts.items()}

    everywhere = NamedSharding(mesh, PartitionSpec())
    outputs = (None, everywhere)  # every host reads the logits
    prefill = jax.jit(north_jax.prefill, static_argnums=0, donate_argnums=2, out_shardings=outputs)
    step = jax.jit(north_jax.decode_step, static_argnums=0, donate_argnums=2, out_shardings=outputs)
    with jax.set_mesh(mesh):
        cache = init_sharded_cache(config, mesh, **total, dtype=config.dtype)
        tokens = np.tile(prompt, (options.data, 1))
        start = np.zeros(options.data, np.int32)
        cache, logits = prefill(config, model.params, cache, tables, tokens, start, start + len(prompt))
        said = []
        for position in range(len(prompt), end):
            newest = np.asarray(logits).argmax(-1).astype(np.int32)
            said.append(newest)
            cache, logits = step(config, model.params, cache, tables, newest, start + position, start == 0)
    texts = [tokenizer.decode(row.tolist()) for row in np.stack(said, axis=1)]
    for text in texts:
        print(options.prompt + text)
    return texts


def part(array: jax.Array) -> str:
    shard = array.addressable_shards[0].data
    return f"{list(array.shape)}: {list(shard.shape)} on each device, {array.sharding.spec}"


if __name__ == "__main__":
    main()
