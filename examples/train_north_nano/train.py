"""Train North Nano on one GPU in minutes.

    python -m examples.train_north_nano.train --tokens tokens.npz --nano north_jax/nano --out run --minutes 6

Muon for the layers' matrices, AdamW for embedding, norms and routers; bfloat16 compute over float32 master weights; a
trapezoid of learning rates over the time given (or over `--steps`, which makes a run repeatable). Rows of a batch are
windows of the joined documents, so attention may cross from one document into the next. `run/north-nano` is rewritten
every two minutes as a bfloat16 checkpoint, `run/log.jsonl` tells the story.
"""

import argparse
import functools
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from north_jax.checkpoint import export
from north_jax.config import Config
from north_jax.layers import Array, Params, head
from north_jax.quality.held_out import held_out_texts
from north_jax.text import Tokenizer

from .evaluate import bits_per_byte, encode_files, next_token_losses
from .network import Attention, choose_attention, geometry, hidden_states, initial_params
from .prepare import STREAMS

MIX = {"stdlib": 0.15, "packages": 0.60, "conversations": 0.25}  # share of each stream in a batch
BALANCE = 0.01  # weight of the load-balancing loss
WARMUP, DECAY = 0.01, 0.45  # shares of the run with a rising and a falling learning rate


@dataclass
class Windows:
    """Endless windows of `context` + 1 tokens from several streams laid end to end."""

    lengths: dict[str, int]
    context: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        ends = np.cumsum(list(self.lengths.values()))
        self._first = dict(zip(self.lengths, ends - list(self.lengths.values()), strict=True))
        self._iterators = {name: self._epochs(name) for name in self.lengths}

    def _epochs(self, name: str) -> Iterator[int]:
        """Starts of windows that cover a stream once, in random order and with a random phase, then again."""
        count = (self.lengths[name] - 1) // self.context - 1
        if count < 1:
            raise ValueError(f"the stream {name!r} is shorter than two windows of {self.context} tokens")
        while True:
            phase = self.rng.integers(self.context)
            for index in self.rng.permutation(count):
                yield int(self._first[name] + phase + index * self.context)

    def batch(self, rows: int) -> np.ndarray:
        """[rows] int32: where the windows of a batch begin, the streams drawn by MIX."""
        names = self.rng.choice(list(MIX), size=rows, p=list(MIX.values()))
        return np.array([next(self._iterators[name]) for name in names], np.int32)


def learning_rate_factor(progress: float) -> float:
    """Share of the peak learning rate at a share of the run: rise, plateau, linear fall to zero."""
    return min(progress / WARMUP, 1.0) * min((1.0 - progress) / DECAY, 1.0)


def optimizer(muon_rate: float, adam_rate: float) -> optax.GradientTransformation:
    """Muon for qkv, o, gate_up and down (each expert's matrix by itself), AdamW for everything else."""

    def dimensions(params: Params) -> Params:
        def of(path: tuple[jax.tree_util.DictKey, ...], weight: Array) -> MuonDimensionNumbers | None:
            matrices = ("qkv", "o", "gate_up", "down")
            return MuonDimensionNumbers(reduction_axis=-1, output_axis=-2) if path[-1].key in matrices else None

        return jax.tree.map_with_path(of, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            muon_rate,
            weight_decay=0.02,
            adam_learning_rate=adam_rate,
            adam_b2=0.98,
            adam_weight_decay=0.01,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def balance(config: Config, router_logits: list[Array]) -> tuple[Array, Array]:
    """(mean over layers of the load-balancing loss, load [layers, E]).

    Load is the share of tokens that an expert sees, k/E where balanced. The loss is the inner product of the shares of
    assignments and of the mean normalised scores, times E: 1 where balanced (Fedus et al., 2021, with sigmoid scores).
    """
    losses, loads = [], []
    for logits in router_logits:
        _, experts = jax.lax.top_k(logits, config.num_experts_per_tok)
        load = jnp.mean(jnp.sum(jax.nn.one_hot(experts, config.num_experts), axis=-2), axis=(0, 1))  # [E]
        scores = jax.nn.sigmoid(logits)
        scores = jnp.mean(scores / jnp.sum(scores, axis=-1, keepdims=True), axis=(0, 1))  # [E]
        losses.append(config.num_experts * jnp.sum(load / config.num_experts_per_tok * scores))
        loads.append(load)
    return jnp.mean(jnp.stack(losses)), jnp.stack(loads)


def loss(config: Config, attention: Attention, params: Params, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    """tokens [B, T + 1] → (what is minimised, (nats per token, expert load [layers, E]))."""
    x, router_logits = hidden_states(config, params, tokens[:, :-1], attention)
    small = {name: params[name].astype(jnp.bfloat16) for name in ("embed", "final_norm")}
    nats = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(head(config, small, x), tokens[:, 1:]))
    balance_loss, load = balance(config, router_logits)
    return nats + BALANCE * balance_loss, (nats, load)


class Trainer:
    """Weights, optimizer state and the compiled functions of one run."""

    def __init__(self, config: Config, transformation: optax.GradientTransformation, context: int, seed: int) -> None:
        attention = choose_attention(config)
        objective = functools.partial(loss, config, attention)
        self.config, self.context = config, context
        self.params = initial_params(config, jax.random.key(seed))
        self._state = transformation.init(self.params)

        # stream [N] uint16, starts [B] int32 → new params and state, [nats per token, gradient norm], load [L, E]
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Params, state: optax.OptState, stream: Array, starts: Array, factor: Array) -> tuple[Any, ...]:
            tokens = stream[starts[:, None] + jnp.arange(context + 1)].astype(jnp.int32)  # [B, T + 1]
            gradients, (nats, load) = jax.grad(objective, has_aux=True)(params, tokens)
            updates, state = transformation.update(gradients, state, params)
            params = jax.tree.map(lambda weight, update: weight + factor * update, params, updates)
            return params, state, jnp.stack([nats, optax.tree.norm(gradients)]), load

        @jax.jit
        def losses(params: Params, tokens: Array) -> Array:
            rounded = to_bfloat16(params)
            return next_token_losses(
                lambda inputs: hidden_states(config, rounded, inputs, attention)[0], config, rounded, tokens
            )

        self._step, self._losses = step, losses

    def step(self, stream: Array, starts: np.ndarray, factor: float) -> tuple[Array, Array]:
        """One update at `factor` times the peak learning rates: ([nats per token, gradient norm], load [layers, E])."""
        self.params, self._state, figures, load = self._step(
            self.params, self._state, stream, starts, np.float32(factor)
        )
        return figures, load

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """Nats of every next token under the weights as they would be shipped: [B, T + 1] → [B, T]."""
        return np.asarray(self._losses(self.params, tokens))


def to_bfloat16(params: Params) -> Params:
    """The weights as they are shipped."""
    return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), params)


def held_out_bits(trainer: Trainer, tokenizer: Tokenizer, limit: int | None) -> float:
    """Bits per byte of the (first `limit`) held-out files as one stream, in windows that do not overlap."""
    texts = [text for _, text in held_out_texts()[:limit]]
    stream = np.concatenate(encode_files(tokenizer, texts))
    size = sum(len(text.encode()) for text in texts)
    return bits_per_byte(trainer.losses, [stream], [size], trainer.context, trainer.context)[0]


def report(line: dict[str, object], log: TextIO) -> None:
    """One JSON line into the log and onto the screen."""
    for file in (log, sys.stdout):
        print(json.dumps(line), file=file, flush=True)


def run(
    trainer: Trainer, windows: Windows, stream: Array, tokenizer: Tokenizer, arguments: argparse.Namespace, log: TextIO
) -> None:
    """The whole run: steps, reports into `log` and onto the screen, checkpoints."""
    begun = time.perf_counter()
    first, load = trainer.step(stream, windows.batch(arguments.batch), 0.0)  # compiles; a factor of 0 changes no weight
    jax.block_until_ready(first)
    held_out_bits(trainer, tokenizer, arguments.held_out_files)
    opening = {
        "device": jax.devices()[0].device_kind,
        "compiled_seconds": round(time.perf_counter() - begun),
        "batch": arguments.batch,
        "context": arguments.context,
        "muon_rate": arguments.muon_rate,
        "adam_rate": arguments.adam_rate,
        "seed": arguments.seed,
    }
    report(opening, log)

    begun = reported = saved = time.perf_counter()
    pending: deque[Array] = deque()
    step, progress = 0, 0.0
    while progress < 1.0:
        figures, load = trainer.step(stream, windows.batch(arguments.batch), learning_rate_factor(progress))
        step += 1
        pending.append(figures)
        if len(pending) > 4:  # bounds how far the host runs ahead
            figures = pending.popleft().block_until_ready()
        now = time.perf_counter()
        progress = step / arguments.steps if arguments.steps else (now - begun) / (60 * arguments.minutes)
        if now - reported > arguments.report_seconds or progress >= 1.0:
            nats, norm = map(float, figures)
            shares = np.asarray(load) / trainer.config.num_experts_per_tok * trainer.config.num_experts
            line = {
                "step": step,
                "seconds": round(now - begun, 1),
                "tokens": step * arguments.batch * arguments.context,
                "nats_per_token": round(nats, 4),
                "gradient_norm": round(norm, 3),
                "held_out_bits_per_byte": round(held_out_bits(trainer, tokenizer, arguments.held_out_files), 4),
                "load_min": [round(float(x), 2) for x in shares.min(axis=1)],  # 1 is an equal share
                "load_max": [round(float(x), 2) for x in shares.max(axis=1)],
            }
            report(line, log)
            reported = time.perf_counter()
        if now - saved > 120 or progress >= 1.0:
            target = arguments.out / "north-nano"
            export(target, trainer.config, to_bfloat16(trainer.params), overwrite=True)
            saved = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="the .npz that prepare.py writes")
    parser.add_argument("--nano", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and log")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="training time after compilation")
    length.add_argument("--steps", type=int, help="number of steps, for a repeatable run")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--muon-rate", type=float, default=0.04)
    parser.add_argument("--adam-rate", type=float, default=0.008)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-seconds", type=float, default=20, help="how often the held-out files are measured")
    parser.add_argument("--held-out-files", type=int, help="measure on only the first so many, for a trial")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_dir(arguments.nano)
    config = geometry(tokenizer)
    with np.load(arguments.tokens) as file:
        streams = {name: file[name] for name in STREAMS}
    windows = Windows(
        {name: ids.size for name, ids in streams.items()}, arguments.context, np.random.default_rng(arguments.seed)
    )
    stream = jax.device_put(np.concatenate(list(streams.values())))
    trainer = Trainer(config, optimizer(arguments.muon_rate, arguments.adam_rate), arguments.context, arguments.seed)
    with (arguments.out / "log.jsonl").open("w") as log:
        run(trainer, windows, stream, tokenizer, arguments, log)


if __name__ == "__main__":
    main()
