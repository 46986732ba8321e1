"""The waves of one layer: the tasks of every operation, to be dealt to the SMs by `build`."""

from __future__ import annotations

from collections.abc import Callable

from ..config import DENSE, FULL
from .abi import MAX_SPLITS, Buffer, Field, Opcode, Weight
from .head import norm_wave
from .orders import Wave
from .tasks import TILE_ROWS, Dealt, Draft, Task, anywhere, qkv_rows, shares, tiles, wait

F = Field


class LayerWaves:
    """The waves of one layer. `end` counts the tasks whose outputs the next norm adds."""

    def __init__(self, draft: Draft, layer: int, previous_end: int | None) -> None:
        """Makes the layer's counters; `previous_end` is the `end` of the layer before, None in the first."""
        config, counters = draft.config, draft.counters
        self._draft, self._layer, self._previous_end = draft, layer, previous_end
        self._dense = config.mlp_layer_types[layer] == DENSE
        self._kv_heads = config.num_key_value_heads
        self._weights = layer * len(Weight)
        name = f"layer {layer}"
        self._hidden = -1 if draft.order.local_norm else counters.new(f"{name} input")
        self._qkv = counters.several(f"{name} queries of KV head {h}" for h in range(self._kv_heads))
        self._partial = counters.several(
            f"{name} splits of row {row}, KV head {h}" for row in range(draft.batch) for h in range(self._kv_heads)
        )
        self._attention = counters.several(f"{name} attention of KV head {h}" for h in range(self._kv_heads))
        if self._dense:
            self._slices = config.dense_intermediate_size // draft.tiling.dense_slice
            self._up = counters.several(f"{name} hidden units, slice {s}" for s in range(self._slices))
        else:
            self._ranks = min(config.num_experts, draft.batch * config.num_experts_per_tok)
            self._router = counters.new(f"{name} router")
            self._up = counters.several(f"{name} hidden units of expert rank {r}" for r in range(self._ranks))
        if not self._dense and draft.order.routed_by_tables:
            self._topk = counters.new(f"{name} top-k")
            self._routes = counters.new(f"{name} routes")
            self._gathered = counters.new(f"{name} gathered inputs")
            self._experts = counters.new(f"{name} expert outputs")
        self.end = counters.new(f"{name} outputs")

    def wave(self, wave: Wave) -> Dealt:
        """The tasks of a wave; none where the layer has no such operation."""
        builders: dict[str, Callable[[], Dealt]] = {
            "norm": self._norm_wave,
            "qkv": self._qkv_wave,
            "attention": lambda: self._attention_wave(wave.drain),
            "combine": self._combine_wave,
            "o_proj": self._o_proj_wave,
        }
        if self._dense:
            builders |= {"up": lambda: self._dense_up_wave(wave), "down": self._dense_down_wave}
        else:
            builders |= {
                "router": self._router_wave,
                "topk": self._topk_wave,
                "finalize": self._finalize_wave,
                "gather": self._gather_wave,
                "up": lambda: self._drain_up_wave() if wave.drain else self._up_wave(wave),
                "down": lambda: self._drain_down_wave() if wave.drain else self._down_wave(),
                "moe_combine": self._moe_combine_wave,
            }
        return builders[wave.name]() if wave.name in builders else anywhere(())

    def _task(self, opcode: Opcode, **fields: int) -> Task:
        return self._draft.task(opcode, self._layer, **fields)

    def _weight(self, kind: Weight) -> Task:
        return {F.WEIGHT: self._weights + kind}

    def _arrive(self, counter: int) -> Task:
        return self._draft.counters.arrive(counter)

    def _norm_wave(self) -> Dealt:
        return norm_wave(self._draft, self._layer, Weight.NORM, self._previous_end, self._hidden)

    def _input(self) -> Task:
        """The fields of a task that reads the layer's normalised input."""
        if self._draft.order.local_norm:
            return {F.INPUT: Buffer.LOCAL_HIDDEN}
        return {F.INPUT: Buffer.HIDDEN} | wait(self._hidden)

    def _qkv_wave(self) -> Dealt:
        config = self._draft.config
        d, heads, group = config.head_dim, config.num_attention_heads, config.queries_per_kv_head
        fixed = self._task(
            Opcode.QKV_PROJ,
            output=Buffer.QKV,
            pool=self._layer,
            window=config.window(self._layer) or 0,
            rope=int(config.rope_layers[self._layer]),
        )
        fixed |= self._weight(Weight.QKV) | self._input()
        # The queries, keys and values of one KV head after the other, dealt as one run of rows: every SM has as many,
        # to a unit, and arrives once a row.
        runs = [
            (begin, end, self._qkv + kv_head)
            for kv_head in range(self._kv_heads)
            for begin, end in (
                (kv_head * group * d, (kv_head + 1) * group * d),
                ((heads + kv_head) * d, (heads + kv_head + 1) * d),
                ((heads + self._kv_heads + kv_head) * d, (heads + self._kv_heads + kv_head + 1) * d),
            )
        ]
        lists: list[list[Task]] = [
            [
                fixed
                | {F.ROW_BEGIN: begin, F.ROW_COUNT: end - begin}
                | self._draft.counters.arrive(counter, end - begin)
                for begin, end, counter in parts
            ]
            for parts in shares(runs, self._draft.sms, qkv_rows(config))
        ]
        return Dealt(lists, fixed=True)

    def _router_wave(self) -> Dealt:
        fixed = self._task(Opcode.ROUTER_GEMM, output=Buffer.ROUTER_LOGITS)
        fixed |= self._weight(Weight.ROUTER) | self._input()
        every = tiles(self._draft.config.num_experts, self._draft.tiling.router_rows)
        return anywhere(fixed | tile | self._arrive(self._router) for tile in every)

    def _attention_wave(self, drain: bool) -> Dealt:
        config = self._draft.config
        drain = drain and config.layer_types[self._layer] == FULL
        task = self._task(
            Opcode.ATTN_DRAIN if drain else Opcode.ATTN_DECODE,
            input=Buffer.QKV,
            output=Buffer.PARTIAL,
            output_2=Buffer.PARTIAL_STATS,
            pool=self._layer,
            window=config.window(self._layer) or 0,
            slice_wait=self._qkv,
        )
        task |= self._draft.counters.arrive_items(self._partial, self._draft.batch * self._kv_heads, MAX_SPLITS)
        if drain:
            task |= self._draft.queue(f"layer {self._layer} attention")
        return self._every_sm(task)

    def _every_sm(self, task: Task) -> Dealt:
        """One dealer or claimer an SM."""
        sms = self._draft.sms
        return Dealt([[task | {F.DEALER: sm, F.DEALERS: sms}] for sm in range(sms)], fixed=True)

    def _combine_wave(self) -> Dealt:
        config, heads = self._draft.config, self._draft.tiling.combine_heads
        fixed = self._task(
            Opcode.ATTN_COMBINE,
            input=Buffer.PARTIAL,
            input_2=Buffer.PARTIAL_STATS,
            output=Buffer.ATTENTION,
            window=config.window(self._layer) or 0,
            batch_count=1,
            row_count=heads,
        )
        tasks = []
        for row in range(self._draft.batch):
            for head in range(0, config.num_attention_heads, heads):
                kv_head = head // config.queries_per_kv_head
                place = {F.BATCH_BEGIN: row, F.ROW_BEGIN: head}
                waits = wait(self._partial + row * self._kv_heads + kv_head)
                tasks.append(fixed | place | waits | self._arrive(self._attention + kv_head))
        return anywhere(tasks)

    def _o_proj_wave(self) -> Dealt:
        config = self._draft.config
        fixed = self._task(
            Opcode.O_PROJ,
            input=Buffer.ATTENTION,
            output=Buffer.ATTENTION_OUT,
            k_slice=config.queries_per_kv_head * config.head_dim,
            slice_wait=self._attention,
        )
        fixed |= self._weight(Weight.OUT)
        splits = self._draft.tiling.splits
        columns = config.num_attention_heads * config.head_dim // splits
        return anywhere(
            fixed | tile | {F.SPLIT: split, F.K_BEGIN: split * columns, F.K_COUNT: columns} | self._arrive(self.end)
            for split in range(splits)
            for tile in tiles(config.hidden_size)
        )

    def _dense_up_wave(self, wave: Wave) -> Dealt:
        tiling, sms = self._draft.tiling, self._draft.sms
        fixed = self._task(Opcode.FFN_UPGATE_ACT, output=Buffer.DENSE_HIDDEN)
        fixed |= self._weight(Weight.GATE_UP) | self._input()
        first, end = wave.rounds
        every = list(tiles(self._draft.config.dense_intermediate_size, tiling.dense_units))
        chosen = every[first * sms : None if end is None else end * sms]
        return anywhere(
            fixed | tile | self._arrive(self._up + tile[F.ROW_BEGIN] // tiling.dense_slice) for tile in chosen
        )

    def _dense_down_wave(self) -> Dealt:
        fixed = self._task(
            Opcode.FFN_DOWN,
            input=Buffer.DENSE_HIDDEN,
            output=Buffer.MLP_OUT,
            k_count=self._draft.config.dense_intermediate_size,
            k_slice=self._draft.tiling.dense_slice,
            slice_wait=self._up,
        )
        return self._onto_residual(fixed)

    def _onto_residual(self, fixed: Task) -> Dealt:
        """Tiles of a down projection."""
        fixed |= self._weight(Weight.DOWN)
        return anywhere(fixed | tile | self._arrive(self.end) for tile in tiles(self._draft.config.hidden_size))

    def _up_wave(self, wave: Wave) -> Dealt:
        units, width = self._draft.tiling.expert_units, self._draft.config.intermediate_size
        each = width // units
        rounds = -(-self._ranks * each // self._draft.sms)  # that any routing can fill
        first, end = wave.rounds
        task = self._task(
            Opcode.MOE_UPGATE_ACT,
            input_2=Buffer.ROUTER_LOGITS,
            output=Buffer.EXPERT_HIDDEN,
            row_count=units,
            round_begin=first,
            round_end=rounds if end is None else min(end, rounds),
        )
        if first >= rounds:
            return anywhere(())
        task |= self._weight(Weight.GATE_UP) | self._input() | wait(self._router)
        return self._every_sm(task | self._draft.counters.arrive_items(self._up, self._ranks, each))

    def _down_wave(self) -> Dealt:
        fixed = self._task(
            Opcode.MOE_DOWN,
            input=Buffer.EXPERT_HIDDEN,
            input_2=Buffer.ROUTER_LOGITS,
            output=Buffer.MLP_OUT,
            slice_wait=self._up,
        )
        return self._onto_residual(fixed | wait(self._router))

    def _topk_wave(self) -> Dealt:
        fixed = self._task(Opcode.ROUTER_TOPK, input=Buffer.ROUTER_LOGITS, output=Buffer.TOPK, batch_count=1)
        fixed |= wait(self._router)
        return anywhere(fixed | {F.BATCH_BEGIN: row} | self._arrive(self._topk) for row in range(self._draft.batch))

    def _finalize_wave(self) -> Dealt:
        task = self._task(Opcode.ROUTE_FINALIZE, input=Buffer.TOPK, output=Buffer.ROUTES)
        return anywhere([task | wait(self._topk) | self._arrive(self._routes)])

    def _gather_wave(self) -> Dealt:
        fixed = self._task(
            Opcode.MOE_GATHER, input=Buffer.HIDDEN, input_2=Buffer.ROUTES, output=Buffer.GATHERED, row_count=1
        )
        fixed |= wait(self._routes)
        assignments = self._draft.batch * self._draft.config.num_experts_per_tok
        return anywhere(fixed | {F.ROW_BEGIN: n} | self._arrive(self._gathered) for n in range(assignments))

    def _drain_up_wave(self) -> Dealt:
        units, width = self._draft.tiling.expert_units, self._draft.config.intermediate_size
        task = self._task(
            Opcode.MOE_UPGATE_ACT_DRAIN,
            input=Buffer.GATHERED,
            input_2=Buffer.ROUTES,
            output=Buffer.EXPERT_HIDDEN,
            row_count=units,
        )
        task |= self._weight(Weight.GATE_UP) | wait(self._gathered)
        task |= self._draft.queue(f"layer {self._layer} up")
        return self._every_sm(task | self._draft.counters.arrive_items(self._up, self._ranks, width // units))

    def _drain_down_wave(self) -> Dealt:
        task = self._task(
            Opcode.MOE_DOWN_DRAIN,
            input=Buffer.EXPERT_HIDDEN,
            input_2=Buffer.ROUTES,
            output=Buffer.EXPERT_OUT,
            row_count=TILE_ROWS,
            slice_wait=self._up,
        )
        task |= self._weight(Weight.DOWN) | wait(self._routes)
        task |= self._draft.queue(f"layer {self._layer} down")
        return Dealt([[task | self._arrive(self._experts)] for _ in range(self._draft.sms)], fixed=True)

    def _moe_combine_wave(self) -> Dealt:
        fixed = self._task(
            Opcode.MOE_COMBINE,
            input=Buffer.EXPERT_OUT,
            input_2=Buffer.TOPK,
            input_3=Buffer.ROUTES,
            output=Buffer.MLP_OUT,
            batch_count=1,
        )
        fixed |= wait(self._experts)
        hidden, sms, batch = self._draft.config.hidden_size, self._draft.sms, self._draft.batch
        columns = max(TILE_ROWS, -(-hidden * batch // sms // TILE_ROWS) * TILE_ROWS)
        return anywhere(
            fixed | {F.BATCH_BEGIN: row} | part | self._arrive(self.end)
            for row in range(batch)
            for part in tiles(hidden, columns)
        )
