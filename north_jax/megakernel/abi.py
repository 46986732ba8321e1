"""The binary interface of the megakernel: opcodes, the task descriptor, buffers, weights, row parameters.

This module is the only definition. `python -m north_jax.megakernel.abi` prints it as `csrc/megakernel/abi.h`, from
which C++ and CUDA take their constants; tests/megakernel/test_abi.py proves that the header in the tree is that text
and that the compiled module was built from it.

A task is a descriptor of 32 int32. `OPERATIONS` says what each opcode does and which fields it reads; a field that it
does not read is 0. A counter's value, less what earlier steps added, is the number of arrivals in this step; a wait
names the number at which nothing is missing. Idle rows of the batch are left alone by every operation. Letters as in
DESIGN.md, "Parameters"; B is the number of rows.
"""

from __future__ import annotations

import dataclasses
import enum

from .. import adjust, kv_cache, sampling
from ..decoding.types import Finish

DESCRIPTOR_FIELDS = 32
ROW_FIELDS = 80
STOP_TOKENS = 8  # a row's stop tokens, -1 where there are fewer
MAX_ROWS = 32  # of a batch
MAX_SPLITS = 32  # of one row's attention
MAX_TOP_K = 16  # experts of a token
PAGE_TOKENS = kv_cache.PAGE_SIZE  # positions of a KV page
SAMPLE_BLOCK = sampling.DRAW_BLOCK  # tokens of one entry of MASS
MAX_BIASES = sampling.MAX_BIASES  # of a row
MAX_LOGPROBS = sampling.MAX_LOGPROBS  # alternatives reported for a token
PROMPT_SEEN = adjust.PROMPT_SEEN  # bit of an entry of COUNTS
PASSES = 6  # of the search for what a row keeps: three for top-k, or top-p alone, and three for top-p after top-k
PASS_BITS = 10  # of a weight that a pass looks at: three passes know all 30 of a float32 in [0, 1]
SEARCH_WORDS = 8  # int32 of a state of the search, see csrc/megakernel/sampling.h
MASS_WORDS = 8  # int32 of a block's entry of MASS


class Lane(enum.IntEnum):
    """What executes a task inside an SM. Each lane walks the SM's list through its own tasks, in order."""

    MATRIX = (
        0  # producer, loader, consumers and epilogue in a pipeline: a task may load before an earlier one has stored
    )
    LOADER = 1  # the loader warps alone, in order with the loads of MATRIX tasks
    SIDE = 2  # separate warps


class Opcode(enum.IntEnum):
    """What a task computes; see OPERATIONS. 0 is none of them, so that zeroed memory is refused."""

    EMBED = 1
    ADD_RMSNORM = 2
    QKV_PROJ = 3
    ROUTER_GEMM = 4
    ATTN_DECODE = 5
    ATTN_DRAIN = 6
    ATTN_COMBINE = 7
    O_PROJ = 8
    FFN_UPGATE_ACT = 9
    FFN_DOWN = 10
    ROUTER_TOPK = 11
    ROUTE_FINALIZE = 12
    MOE_GATHER = 13
    MOE_UPGATE_ACT = 14
    MOE_DOWN = 15
    MOE_UPGATE_ACT_DRAIN = 16
    MOE_DOWN_DRAIN = 17
    MOE_COMBINE = 18
    LM_HEAD = 19
    SAMPLE_HISTOGRAM = 20
    SAMPLE_MASS = 21
    SAMPLE_DRAW = 22
    END_STEP = 23


class Field(enum.IntEnum):
    """Index of each field in a descriptor."""

    OPCODE = 0
    LAYER = 1  # chooses the plane of every buffer; head and sampling follow the last layer
    WEIGHT = 2  # index into the weight table
    ROW_BEGIN = 3  # first output row, and how many: of a weight, of query heads, of the vocabulary
    ROW_COUNT = 4
    BATCH_BEGIN = 5  # first row of the batch, and how many
    BATCH_COUNT = 6
    K_BEGIN = 7  # first input column of a matrix product, and how many
    K_COUNT = 8
    K_SLICE = 9  # input columns that are waited for and staged together; divides K_COUNT
    # O_PROJ: the part of ATTENTION_OUT to write; ADD_RMSNORM: how many parts to add; SAMPLE_HISTOGRAM: the pass.
    SPLIT = 10
    INPUT = 11  # buffers, by `Buffer`
    INPUT_2 = 12
    INPUT_3 = 13
    OUTPUT = 14
    OUTPUT_2 = 15
    POOL = 16  # index of the layer's KV pages
    WINDOW = 17  # keys a query sees, its own included, in pages of the sliding table; 0: all, in the full table
    ROPE = 18  # 1: rotate queries and keys
    DEALER = 19  # number of this task among the DEALERS that share dynamic work
    DEALERS = 20
    ROUND_BEGIN = 21  # dynamic item i is dealt to DEALER i mod DEALERS in round i div DEALERS
    ROUND_END = 22
    QUEUE = 23  # claim word of a drained queue
    WAIT = 24  # WAIT_COUNT counters from WAIT on must each show WAIT_NEED arrivals
    WAIT_NEED = 25
    WAIT_COUNT = 26  # 0: no wait
    SLICE_WAIT = 27  # counter of the first K slice, KV head or expert rank; those of the others follow
    SLICE_NEED = 28  # 0: no wait
    ARRIVE = 29  # counter, or the first of those that dynamic items arrive at
    ARRIVE_COUNT = 30  # arrivals at it; 0: none
    TASK = 31  # number of the task in its schedule, for reports


class Buffer(enum.IntEnum):
    """Activations of one step. "T" is the type of the weights."""

    NONE = 0
    RESIDUAL = 1  # [B, D] float32, the stream between layers
    HIDDEN = 2  # [B, D] T, the normalised input of a layer
    LOCAL_RESIDUAL = 3  # as RESIDUAL, a copy for each SM
    LOCAL_HIDDEN = 4  # as HIDDEN, a copy for each SM
    QKV = 5  # [B, (H + 2K)·d] T, queries and keys rotated
    ROUTER_LOGITS = 6  # [B, E] float32
    PARTIAL = 7  # [B, K, MAX_SPLITS, H/K, d] float32, attention over one split, not normalised
    # [B, K, MAX_SPLITS, H/K, 2] float32, maximum and sum of a split; the pipelined kernel's maximum is log2(e) times
    # that of the scores, for the exponential to base 2.
    PARTIAL_STATS = 8
    ATTENTION = 9  # [B, H·d] T
    ATTENTION_OUT = 10  # [splits, B, D] float32
    DENSE_HIDDEN = 11  # [B, F] T
    EXPERT_HIDDEN = (
        12  # [B·k, I] T, by assignment (row · k + j) and times the router weight; of drains, by sorted assignment
    )
    MLP_OUT = 13  # [B, D] float32
    TOPK = 14  # [B, k, 2] int32: expert (-1 in an idle row), bits of the float32 router weight
    ROUTES = 15  # [routes_size(E, B·k)] int32, see division
    GATHERED = 16  # [B·k, D] T, by sorted assignment
    EXPERT_OUT = 17  # [B·k, D] float32, by sorted assignment
    LOGITS = 18  # [B, V] float32
    # [B, ranges, MAX_LOGPROBS, 2] int32: bits of the largest logit of a vocabulary range (NaN if it holds one) and its
    # token; in rows that report alternatives, the next ones behind it, −infinity where there are fewer.
    RANGE_BEST = 19
    # [B] rows of PASSES histograms [2^PASS_BITS] uint64, how many tokens, or how much fixed-point weight, have which
    # digits of their weights, and of a state [PASSES, SEARCH_WORDS] int32, what was known before each pass. The
    # histograms are zero when a step begins.
    SEARCH = 20
    # [B, ceil(V / SAMPLE_BLOCK), MASS_WORDS] int32, of a block of tokens: bits of two float32 sums of weights, of the
    # tokens at or above the cut and of those above it; the number of those at it; in rows that report them, bits of the
    # sum of exp(logit - largest); the cut: bits of the least weight that the row keeps, and how many tokens at it.
    MASS = 21


class Weight(enum.IntEnum):
    """Kinds of weights. Kind k of layer l is entry l · len(Weight) + k; EMBED and FINAL_NORM follow the last layer."""

    NORM = 0  # [D]
    QKV = 1  # [(H + 2K)·d, D]
    OUT = 2  # [D, H·d]
    ROUTER = 3  # [E, D]
    GATE_UP = 4  # [2F, D] or [E, 2I, D], gate rows first
    DOWN = 5  # [D, F] or [E, D, I]
    EMBED = 6  # [V, D]
    FINAL_NORM = 7  # [D]


class Row(enum.IntEnum):
    """Index of each int32 of a row's parameters. A step writes TOKEN to FINISH and LOGPROB to TOP_LOGPROB.

    Besides, a batch has COUNTS [histories, V] int32 (see adjust.count), of which a step updates the rows that are
    named, BIASES [B, MAX_BIASES, 2] int32 (token, bits of the bias) and MASKS [B, ceil(V / 32)] uint32.
    """

    TOKEN = 0  # the newest token, not yet in the cache
    POSITION = 1  # positions the row holds already
    REMAINING = 2  # tokens it may still generate; 0 in an idle row
    FINISH = 3  # a Finish
    SLOT = 4  # the caller's name for the row, in the token ring and in cancellations
    TEMPERATURE = 5  # bits of a float32, as TOP_P and MIN_P; 0 is greedy
    TOP_K = 6
    TOP_P = 7
    MIN_P = 8
    SEED_HIGH = 9
    SEED_LOW = 10
    PRESENCE = 11  # bits of the penalties, float32
    FREQUENCY = 12
    REPETITION = 13  # of a row with a HISTORY
    HISTORY = 14  # 1 + the row of COUNTS that penalties look at; 0: none apply
    LOGPROBS = 15  # 1 + alternatives to report; 0: no log-probabilities
    STOP = 16  # STOP_TOKENS tokens, -1 for none
    BIAS_COUNT = 24  # entries of the row's BIASES
    MASKED = 25  # 1: the row's MASKS apply
    LOGPROB = 32  # bits of the drawn token's log-probability, in rows that report it
    TOP_TOKEN = 33  # MAX_LOGPROBS tokens, the likeliest first; -1 where fewer are possible or asked for
    TOP_LOGPROB = 53  # bits of their log-probabilities


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What is known of an opcode: its lane, and the fields that change what it does."""

    lane: Lane
    fields: frozenset[Field]
    routed: bool = False  # needs the router's choice before it can fetch weights: the producer does its WAIT
    claims: bool = False  # takes items from a queue
    optional: bool = False  # arrives at once, without its wait, where no row's parameters ask for it


F = Field
_WAIT = {F.WAIT, F.WAIT_NEED, F.WAIT_COUNT}
_SLICES = {F.SLICE_WAIT, F.SLICE_NEED}
_ARRIVE = {F.ARRIVE, F.ARRIVE_COUNT}
_BATCH = {F.LAYER, F.BATCH_BEGIN, F.BATCH_COUNT}
_ROWS = {F.ROW_BEGIN, F.ROW_COUNT}
_MATRIX = {F.WEIGHT, F.INPUT, F.OUTPUT} | _BATCH | _ROWS
_K = {F.K_BEGIN, F.K_COUNT, F.K_SLICE}
_DEAL = {F.DEALER, F.DEALERS}
_ROUNDS = {F.ROUND_BEGIN, F.ROUND_END}
_ATTEND = {F.POOL, F.WINDOW, F.INPUT, F.OUTPUT, F.OUTPUT_2} | _BATCH | _SLICES | _ARRIVE | _DEAL


def _op(
    lane: Lane, *parts: set[Field], routed: bool = False, claims: bool = False, optional: bool = False
) -> Operation:
    return Operation(lane, frozenset().union(*parts), routed, claims, optional)


OPERATIONS: dict[Opcode, Operation] = {
    # OUTPUT = embedding of each row's TOKEN.
    Opcode.EMBED: _op(Lane.LOADER, {F.WEIGHT, F.OUTPUT}, _BATCH, _ARRIVE),
    # r = INPUT, and where INPUT_2 is not NONE, the SPLIT parts of INPUT_2, and INPUT_3, added to it in this order; all
    # three are then layer LAYER - 1's, and OUTPUT_2 = r. OUTPUT = norm(r) · WEIGHT.
    Opcode.ADD_RMSNORM: _op(
        Lane.LOADER, {F.WEIGHT, F.INPUT, F.INPUT_2, F.INPUT_3, F.SPLIT, F.OUTPUT, F.OUTPUT_2}, _BATCH, _WAIT, _ARRIVE
    ),
    # OUTPUT[:, rows] = INPUT · WEIGHT[rows]ᵀ; queries and keys rotated by ROPE at POSITION; keys and values also go to
    # their place in POOL. Rows are queries of one KV head, or of its key or value; ARRIVE_COUNT is ROW_COUNT.
    Opcode.QKV_PROJ: _op(Lane.MATRIX, _MATRIX, {F.POOL, F.WINDOW, F.ROPE}, _WAIT, _ARRIVE),
    # OUTPUT[:, rows] = INPUT · WEIGHT[rows]ᵀ in float32.
    Opcode.ROUTER_GEMM: _op(Lane.MATRIX, _MATRIX, _WAIT, _ARRIVE),
    # Attends from INPUT's queries to one split of one KV head of one row, item by item (division.attention_items). An
    # item of KV head h waits for SLICE_WAIT + h and brings ARRIVE_COUNT arrivals to ARRIVE + row · K + h, the last
    # split those of the missing ones too, so that MAX_SPLITS · ARRIVE_COUNT come in all; for an idle row, DEALER
    # (row · K + h) mod DEALERS brings them. The step's own key and value come from INPUT, earlier ones from POOL.
    Opcode.ATTN_DECODE: _op(Lane.MATRIX, _ATTEND),
    # The same items, claimed one by one from QUEUE instead of dealt.
    Opcode.ATTN_DRAIN: _op(Lane.MATRIX, _ATTEND, {F.QUEUE}, claims=True),
    # OUTPUT[row, query heads ROW_BEGIN …] = splits of INPUT (PARTIAL) and INPUT_2 (PARTIAL_STATS), folded in order.
    Opcode.ATTN_COMBINE: _op(Lane.SIDE, {F.INPUT, F.INPUT_2, F.OUTPUT, F.WINDOW}, _BATCH, _ROWS, _WAIT, _ARRIVE),
    # OUTPUT[SPLIT][:, rows] = INPUT[:, K] · WEIGHT[rows, K]ᵀ in float32. The input's columns from i · K_SLICE on wait
    # for SLICE_WAIT + i.
    Opcode.O_PROJ: _op(Lane.MATRIX, _MATRIX, _K, {F.SPLIT}, _SLICES, _ARRIVE),
    # OUTPUT[:, rows] = silu(INPUT · gateᵀ) · (INPUT · upᵀ); rows count hidden units, WEIGHT holds gate above up.
    Opcode.FFN_UPGATE_ACT: _op(Lane.MATRIX, _MATRIX, _WAIT, _ARRIVE),
    # As O_PROJ, without SPLIT.
    Opcode.FFN_DOWN: _op(Lane.MATRIX, _MATRIX, _K, _SLICES, _ARRIVE),
    # OUTPUT[rows of the batch] = experts and weights chosen from INPUT.
    Opcode.ROUTER_TOPK: _op(Lane.SIDE, {F.INPUT, F.OUTPUT}, _BATCH, _WAIT, _ARRIVE),
    # OUTPUT = the routes of INPUT (TOPK): active experts in ascending order, assignments sorted by them.
    Opcode.ROUTE_FINALIZE: _op(Lane.SIDE, {F.INPUT, F.OUTPUT}, _BATCH, _WAIT, _ARRIVE),
    # OUTPUT[sorted assignment] = INPUT[its row], for the assignments ROW_BEGIN …; INPUT_2 = ROUTES.
    Opcode.MOE_GATHER: _op(Lane.SIDE, {F.INPUT, F.INPUT_2, F.OUTPUT}, _BATCH, _ROWS, _WAIT, _ARRIVE),
    # Tile by tile of the active experts, chosen from INPUT_2 (ROUTER_LOGITS): OUTPUT[assignment, units] = router weight
    # · silu(INPUT · gateᵀ) · (INPUT · upᵀ). ROW_COUNT hidden units a tile; items: division.expert_items, of the rounds.
    # Each arrives at ARRIVE + expert rank; the arrivals of absent ranks, of min(E, B·k) in all, are brought by DEALER
    # rank mod DEALERS in the task with ROUND_BEGIN 0.
    Opcode.MOE_UPGATE_ACT: _op(
        Lane.MATRIX,
        {F.WEIGHT, F.INPUT, F.INPUT_2, F.OUTPUT, F.ROW_COUNT},
        _BATCH,
        _DEAL,
        _ROUNDS,
        _WAIT,
        _ARRIVE,
        routed=True,
    ),
    # OUTPUT[:, rows] = sum over the active experts in ascending order of INPUT · WEIGHT[expert, rows]ᵀ; INPUT_2
    # = ROUTER_LOGITS. Rank r waits for SLICE_WAIT + r.
    Opcode.MOE_DOWN: _op(Lane.MATRIX, _MATRIX, {F.INPUT_2}, _WAIT, _SLICES, _ARRIVE, routed=True),
    # As MOE_UPGATE_ACT on INPUT (GATHERED) by INPUT_2 (ROUTES), claimed, without the router weight.
    Opcode.MOE_UPGATE_ACT_DRAIN: _op(
        Lane.MATRIX,
        {F.WEIGHT, F.INPUT, F.INPUT_2, F.OUTPUT, F.ROW_COUNT, F.QUEUE},
        _BATCH,
        _DEAL,
        _WAIT,
        _ARRIVE,
        routed=True,
        claims=True,
    ),
    # OUTPUT[sorted assignment, rows] = INPUT · WEIGHT[expert, rows]ᵀ; ROW_COUNT rows a tile; INPUT_2 = ROUTES. Rank r
    # waits for SLICE_WAIT + r. Arrives once, when the queue is empty.
    Opcode.MOE_DOWN_DRAIN: _op(
        Lane.MATRIX,
        {F.WEIGHT, F.INPUT, F.INPUT_2, F.OUTPUT, F.ROW_COUNT, F.QUEUE},
        _BATCH,
        _WAIT,
        _SLICES,
        _ARRIVE,
        routed=True,
        claims=True,
    ),
    # OUTPUT[row, columns ROW_BEGIN …] = sum over a row's experts in ascending order of weight · INPUT (EXPERT_OUT);
    # INPUT_2 = TOPK, INPUT_3 = ROUTES.
    Opcode.MOE_COMBINE: _op(Lane.SIDE, {F.INPUT, F.INPUT_2, F.INPUT_3, F.OUTPUT}, _BATCH, _ROWS, _WAIT, _ARRIVE),
    # OUTPUT[:, rows] = logit_scale · INPUT · WEIGHT[rows]ᵀ in float32, changed as the row's penalties, biases and mask
    # say (see adjust); OUTPUT_2[:, DEALER] = the largest of them.
    Opcode.LM_HEAD: _op(Lane.MATRIX, _MATRIX, {F.OUTPUT_2, F.DEALER, F.DEALERS}, _WAIT, _ARRIVE),
    # One pass of the search for the least weight that top-k and top-p keep, for vocabulary range DEALER of DEALERS:
    # folds the histogram of pass SPLIT - 1 and adds the range's tokens of INPUT to that of pass SPLIT. INPUT_2
    # = RANGE_BEST, OUTPUT = SEARCH; DEALER 0 writes the state there, which all read in the next pass.
    Opcode.SAMPLE_HISTOGRAM: _op(
        Lane.SIDE,
        {F.INPUT, F.INPUT_2, F.OUTPUT, F.SPLIT},
        _BATCH,
        _ROWS,
        _DEAL,
        _WAIT,
        _ARRIVE,
        optional=True,
    ),
    # OUTPUT[row, blocks] = sums over each block of the vocabulary range; INPUT = LOGITS, INPUT_2 = RANGE_BEST, INPUT_3
    # = SEARCH after its last pass.
    Opcode.SAMPLE_MASS: _op(
        Lane.SIDE,
        {F.INPUT, F.INPUT_2, F.INPUT_3, F.OUTPUT, F.DEALERS},
        _BATCH,
        _ROWS,
        _WAIT,
        _ARRIVE,
        optional=True,
    ),
    # Draws each row's token, applies stop conditions, updates the row's parameters and COUNTS and writes to the token
    # ring; INPUT = LOGITS, INPUT_2 = RANGE_BEST of DEALERS ranges, INPUT_3 = MASS. Zeroes the row's histograms in
    # OUTPUT (SEARCH) for the next step.
    Opcode.SAMPLE_DRAW: _op(Lane.SIDE, {F.INPUT, F.INPUT_2, F.INPUT_3, F.OUTPUT, F.DEALERS}, _BATCH, _WAIT, _ARRIVE),
    # Ends the step: every task of it happened before. Zeroes ROW_COUNT claim words from QUEUE on, reads the control
    # word, decides whether a further step runs, and lets every lane go on.
    Opcode.END_STEP: _op(Lane.SIDE, {F.QUEUE, F.ROW_COUNT}, _WAIT),
}


def header() -> str:
    """The text of csrc/megakernel/abi.h."""
    lines = [
        "// Generated by `python -m north_jax.megakernel.abi`; change that module, not this file.",
        "// clang-format off",
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
        "namespace north_jax::megakernel {",
        "",
    ]
    constants = (
        "DESCRIPTOR_FIELDS",
        "ROW_FIELDS",
        "STOP_TOKENS",
        "MAX_ROWS",
        "MAX_SPLITS",
        "MAX_TOP_K",
        "PAGE_TOKENS",
        "SAMPLE_BLOCK",
        "MAX_BIASES",
        "MAX_LOGPROBS",
        "PROMPT_SEEN",
        "PASSES",
        "PASS_BITS",
        "SEARCH_WORDS",
        "MASS_WORDS",
    )
    for name in constants:
        lines.append(f"inline constexpr int32_t k{_camel(name)} = {globals()[name]};")
    for kind in (Lane, Opcode, Field, Buffer, Weight, Row, Finish):
        lines += ["", f"enum {kind.__name__} : int32_t {{"]
        prefix = "" if kind is Opcode else f"{kind.__name__.upper()}_"
        lines += [f"    {prefix}{member.name} = {member.value}," for member in kind]
        lines.append("};")
        lines.append(f"inline constexpr int32_t k{kind.__name__}Count = {max(kind) + 1};")
    lines += [
        "",
        "struct Operation {",
        "    const char* name;",
        "    Lane lane;",
        "    bool routed;",
        "    bool claims;",
        "    bool optional;",
        "    uint32_t fields;  // bit f: field f is read",
        "};",
        "",
    ]
    lines.append("inline constexpr Operation kOperations[kOpcodeCount] = {")
    lines.append('    {"no operation", LANE_MATRIX, false, false, false, 0u},')
    for opcode, op in OPERATIONS.items():
        mask = sum(1 << field for field in op.fields)
        flags = ", ".join(str(flag).lower() for flag in (op.routed, op.claims, op.optional))
        lines.append(f'    {{"{opcode.name}", LANE_{op.lane.name}, {flags}, 0x{mask:08x}u}},')
    lines += ["};", "", "inline constexpr const char* kFieldNames[kFieldCount] = {"]
    lines += [f'    "{field.name}",' for field in Field]
    lines += ["};", "", "inline constexpr const char* kBufferNames[kBufferCount] = {"]
    lines += [f'    "{buffer.name}",' for buffer in Buffer]
    lines += ["};", "", "}  // namespace north_jax::megakernel", ""]
    return "\n".join(lines)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


if __name__ == "__main__":
    print(header(), end="")
