"""One backend of a model at work on the two measurements: nats of given text, and completions of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..compare.passes import next_token_nats
from ..config import Config
from ..decoding import Backend, Draw, Finish, SlotSampler, TokenHistory, TokenRecord, finish_of, make_decoder
from ..decoding.types import DecodeRow
from ..layers import Params
from ..megakernel.decoder import MegakernelDecoder
from ..megakernel.forced import forced
from ..moe import Method
from ..prompt_rows import PromptRows
from ..sampling import SamplingParams

_QUANTUM = 32  # decode steps between looks at what was written


class Scorer:
    """A model, its decoder for some backend, and the cache that it decodes in. One size of batch is compiled."""

    def __init__(self, config: Config, params: Params, *, backend: Backend, rows: int, max_context: int) -> None:
        """Compiles the decoder.

        Args:
          config: the model's configuration.
          params: DESIGN.md, "Parameters".
          backend: "jax", "warp" or "megakernel".
          rows: texts and completions that are computed together.
          max_context: most tokens of a text, and of a prompt with its completion.

        Raises:
          BackendError: the backend cannot decode here.
        """
        self.backend = backend
        self._config, self._params = config, params
        self._decoder = make_decoder(config, params, backend=backend, slots=rows, max_context=max_context)
        self._rows = PromptRows(config, params, rows=rows, max_context=max_context)
        self._decoder.compile(self._rows.cache, self._rows.tables())
        self._sampler = SlotSampler(rows, config.vocab_size)

    def nats(self, tokens: np.ndarray) -> float:
        """What all tokens but the first of each text cost: the megakernel decodes them, JAX sees texts as a whole.

        Args:
          tokens: [N, T] int32; N up to the rows, T up to the context.
        """
        if isinstance(self._decoder, MegakernelDecoder):
            total = 0.0
            for position in forced(self._decoder, self._rows, tokens[:, :-1], 0):
                logits = self._decoder.logits().astype(np.float64)
                largest = logits.max(axis=1)
                normaliser = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
                total += float(np.sum(normaliser - logits[np.arange(len(tokens)), tokens[:, position + 1]]))
            return total
        method: Method = "warp" if self.backend == "warp" else "auto"
        dtype = self._params["embed"].dtype
        return float(next_token_nats(self._config, self._params, tokens, dtype, method).sum(dtype=np.float64))

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        most: int,
        enough: Callable[[int, list[int]], bool],
    ) -> list[list[int]]:
        """Continues prompts, all together.

        Args:
          prompts: token ids; up to the rows.
          sampling: how each draws.
          most: tokens of a completion.
          enough: told (number of the prompt, its tokens so far) now and then; True ends it.

        Returns:
          the tokens of each, without the one that ended the text.

        Raises:
          FloatingPointError: logits are not finite.
        """
        stops = frozenset(self._config.eos_token_id)
        histories = [TokenHistory(prompt) for prompt in prompts]
        logits = self._rows.prefill([*prompts, *[[]] * (self._rows.count - len(prompts))])
        draws = {i: Draw(len(prompt), sampling[i], histories[i]) for i, prompt in enumerate(prompts)}
        drawn = self._sampler.draw(logits, draws)
        written: list[list[int]] = [[] for _ in prompts]
        going: set[int] = set(draws)

        def take(records: list[TokenRecord]) -> None:
            for record in records:
                if record.finish is Finish.ERROR:
                    raise FloatingPointError(f"the logits after {len(written[record.slot])} tokens are not finite")
                if record.finish is not Finish.STOP:
                    written[record.slot].append(record.token)
                if record.finish is not Finish.NONE:
                    going.discard(record.slot)

        take([TokenRecord(i, token, finish_of(token, most, stops)) for i, (token, _) in drawn.items()])
        while going := {i for i in going if not enough(i, written[i])}:
            rows = []
            for i in sorted(going):
                position, remaining = len(prompts[i]) + len(written[i]) - 1, most - len(written[i])
                rows.append(DecodeRow(i, written[i][-1], position, remaining, stops, sampling[i], histories[i]))
                self._rows.grow(i, position, position + min(_QUANTUM, remaining))
            tables = self._rows.tables()
            self._rows.cache = self._decoder.decode(self._rows.cache, tables, rows, _QUANTUM, take)
        return written
