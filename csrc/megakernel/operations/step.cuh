// The end of a step: tokens out, claim words back to zero, and whether another step runs.
#pragma once

#include "csrc/megakernel/device/context.cuh"

namespace north_jax::megakernel {

// Bit b: row b of the batch is live.
__device__ inline uint32_t live_rows(const DevicePlan& plan, const DeviceBatch& batch) {
    uint32_t live = 0;
    for (int b = 0; b < plan.batch; ++b)
        live |= static_cast<uint32_t>(batch.rows[b * kRowFields + ROW_REMAINING] > 0) << b;
    return live;
}

// Writes an entry for each row that this step began with: the leader what every entry has, the team the alternatives.
// False after a fault.
__device__ inline bool publish_tokens(const Context& c, const Team& team, uint32_t live) {
    Channel* channel = c.channel;
    uint64_t written = load_acquire_system(&channel->written);  // nobody else writes it
    const uint64_t end = written + __popc(live);
    bool room = true;
    if (team.leader()) {
        room = wait_until(
            c, [&] { return end - load_acquire_system(&channel->read) <= kRingEntries; },
            [&] { report(c, DeviceFault::kRingFull, -1, 0, 0); });
    }
    if (!team.all(room)) return false;
    bool reports = false;
    for (int b = 0; b < c.plan.batch; ++b) {
        if (!(live >> b & 1)) continue;
        const int* row = c.row(b);
        TokenEntry& entry = channel->ring[written++ % kRingEntries];
        const int finish = row[ROW_FINISH];
        const bool drawn = finish != FINISH_CANCELLED && finish != FINISH_ERROR;
        const int alternatives = drawn ? row[ROW_LOGPROBS] - 1 : -1;
        reports |= alternatives >= 0;
        for (int i = team.thread; i < alternatives; i += team.threads) {
            entry.top_token[i] = row[ROW_TOP_TOKEN + i];
            entry.top_logprob[i] = __int_as_float(row[ROW_TOP_LOGPROB + i]);
        }
        if (!team.leader()) continue;
        entry.quantum = c.quantum.number;
        entry.step = c.step;
        entry.slot = row[ROW_SLOT];
        entry.token = drawn ? row[ROW_TOKEN] : -1;
        entry.finish = finish;
        entry.alternatives = alternatives;
        entry.logprob = __int_as_float(row[ROW_LOGPROB]);
    }
    if (reports) __threadfence_system();
    team.sync();
    if (team.leader()) store_release_system(&channel->written, written);
    return true;
}

// `live`, in shared memory: the rows that this step began with; those of the next one afterwards.
__device__ __noinline__ inline bool end_step(const Context& c, const Team& team, uint32_t* live) {
    if (!wait_task(c, team)) return false;
    for (int i = team.thread; i < c.field(FIELD_ROW_COUNT); i += team.threads) {
        c.words.claims[c.field(FIELD_QUEUE) + i] = 0;
    }
    const bool ok = publish_tokens(c, team, *live);  // the team has read it before the leader goes on
    if (team.leader()) {
        *live = live_rows(c.plan, c.batch);
        // By difference: quanta are numbered without end.
        const int32_t behind = static_cast<int32_t>(load_acquire_system(&c.channel->stop) - c.quantum.number);
        const bool ended = behind >= 0 || *live == 0 || c.step + 1 >= c.quantum.steps;
        if (ok) store_release(c.words.decision, 2u * (c.step + 1) + ended);
    }
    return team.all(ok);
}

// Waits for the end of the step; `ended` says, to the whole team, whether it was the quantum's last. False after a
// fault.
__device__ inline bool await_decision(const Context& c, const Team& team, uint32_t* shared, bool* ended) {
    bool ok = true;
    team.sync();
    if (team.leader()) {
        uint32_t decision = 0;
        ok = wait_until(
            c,
            [&] {
                decision = load_acquire(c.words.decision);
                return decision / 2 > static_cast<uint32_t>(c.step);
            },
            [&] { report(c, DeviceFault::kStepEnd, -1, c.step + 1, decision / 2); },
            2);  // so that whoever keeps the step from ending is heard first
        *shared = decision;
    }
    ok = team.all(ok);
    *ended = *shared & 1;
    return ok;
}

}  // namespace north_jax::megakernel
