// Where steps begin and end: what a step reads of its rows, sampling, the step's end. By all warps of the loader.
#pragma once

#include "csrc/megakernel/operations/draw.cuh"
#include "csrc/megakernel/operations/sample.cuh"
#include "csrc/megakernel/operations/step.cuh"
#include "csrc/megakernel/pipeline/loader.cuh"

namespace north_jax::megakernel::pipeline {

struct StepEnd {
    __device__ __forceinline__ static bool takes(int opcode) {
        return opcode == SAMPLE_HISTOGRAM || opcode == SAMPLE_MASS || opcode == SAMPLE_DRAW || opcode == END_STEP;
    }

    __device__ __forceinline__ static bool run(Loader& r) {
        if (!r.agreed(true)) return false;
        const Context c = copy_of_context(r);
        switch (c.field(FIELD_OPCODE)) {
            case SAMPLE_HISTOGRAM:
                return r.ended(sample_histogram(c, r.team(), r.memory.sample()));
            case SAMPLE_MASS:
                return r.ended(sample_mass(c, r.team()));
            case SAMPLE_DRAW:
                return r.ended(sample_draw(c, r.team(), r.memory.sample()));
            default:
                return r.ended(megakernel::end_step(c, r.team(), &r.shared().live_rows));
        }
    }

    // Waits for the end of the step; `ended` says whether it was the quantum's last. False after a fault.
    __device__ __forceinline__ static bool await(Loader& r, bool* ended) {
        const Context c = copy_of_context(r);
        return r.ended(await_decision(c, r.team(), &r.shared().decision, ended));
    }

    // Makes ready what the block's roles read of a step, and lets them begin it.
    __device__ __forceinline__ static void open(Loader& r, bool ended) {
        Shared& s = r.shared();
        const Geometry& g = r.c.plan.geometry;
        const int batch = r.c.plan.batch, thread = r.thread();
        if (!ended) {
#pragma unroll 1
            for (int i = thread; i < batch * kRowFields; i += kLoaderWarps * 32) {
                r.memory.rows[i] = __ldcg(r.c.batch.rows + i);
            }
            if (thread >= 32 && thread < 32 + 2 * batch) {  // other threads than those with page numbers
                const int i = thread - 32, b = i % batch;
                const int position = __ldcg(r.c.batch.rows + b * kRowFields + ROW_POSITION);
                const bool live = __ldcg(r.c.batch.rows + b * kRowFields + ROW_REMAINING) > 0;
                Splits splits = attention_splits(position, i < batch ? 0 : r.c.plan.window);
                if (!live) splits.count = 0;
                r.memory.splits[i] = splits;
            }
            if (thread < 2 * batch) {
                const int b = thread / 2, page = __ldcg(r.c.batch.rows + b * kRowFields + ROW_POSITION) / kPageTokens;
                const DeviceBatch& all = r.c.batch;
                r.memory.pages_of_rows[thread] =
                    thread % 2 == 0
                        ? (page < all.full_entries ? __ldg(all.full_table + b * all.full_entries + page) : -1)
                        : __ldg(all.sliding_table + b * all.sliding_entries + page % all.sliding_entries);
            }
#pragma unroll 1
            for (int i = thread; i < batch * (g.head_dim / 2); i += kLoaderWarps * 32) {
                const int b = i / (g.head_dim / 2), pair = i % (g.head_dim / 2);
                const int position = __ldcg(r.c.batch.rows + b * kRowFields + ROW_POSITION);
                float sine, cosine;
                sincosf(static_cast<float>(position) * r.c.plan.frequencies[pair], &sine, &cosine);
                r.memory.rotation[i] = {cosine, sine};
            }
        }
        if (!ended) {
            clear_exchanged(r.c, r.team());
            r.sync();  // the splits are there
            if (thread < 2) {
                int items = 0;
#pragma unroll 1
                for (int b = 0; b < batch; ++b) items += r.memory.splits[thread * batch + b].count;
                s.attention_items[thread] = items * g.kv_heads;
            }
        }
        if (thread < 32 && !ended) {
            const bool lives = thread < batch && __ldcg(r.c.batch.rows + thread * kRowFields + ROW_REMAINING) > 0;
            const uint32_t rows = __ballot_sync(~0u, lives);
            if (thread == 0) s.live_rows = rows;
        }
        if (thread == 0) {
            s.ended = ended;
            s.step = r.c.step;
        }
        // Sampling wrote where bulk copies of stages will.
        fence_shared_for_bulk_copies();
        r.sync();
        if (thread == 0) barrier_arrive(&s.step_begins);
    }

   private:
    // A copy, since what others see by reference lies in memory, and the role should not. The words are those of the
    // block: their address would otherwise take a register throughout the step.
    __device__ __forceinline__ static Context copy_of_context(const Loader& r) {
        const Context& c = r.c;
        return {c.plan, *r.shared().words, c.batch, c.channel, c.fault, c.quantum, c.sm, c.role, c.step,
                c.task, c.fields};
    }
};

}  // namespace north_jax::megakernel::pipeline
