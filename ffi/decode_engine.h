// What a decode call finds behind the engine id among its attributes: the model, its schedules, the quanta that wait
// for a call, and the channel that tokens come through.
//
// Quanta are numbered from 1 in the order in which they are queued, and calls take them in that order. One thread
// queues and makes the calls, one takes entries; `stop` and `cancel` may come from any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/megakernel/channel.h"
#include "csrc/megakernel/plan.h"
#include "csrc/reference/executor.h"
#include "ffi/decode_platform.h"

namespace north_jax {

// One quantum: how a call is to run.
struct Quantum {
    uint32_t number;
    std::shared_ptr<const megakernel::TaskLists> lists;
    int32_t steps;
    megakernel::ExecutorOptions options;
};

class DecodeEngine {
   public:
    static std::shared_ptr<DecodeEngine> create(megakernel::Model model, std::unique_ptr<DecodePlatform> platform);
    // The engine of this id, kept while the caller holds it; null where it never was, or was closed.
    static std::shared_ptr<DecodeEngine> find(int64_t id);

    DecodeEngine(const DecodeEngine&) = delete;
    DecodeEngine& operator=(const DecodeEngine&) = delete;

    int64_t id() const { return id_; }
    const megakernel::Model& model() const { return model_; }
    DecodePlatform& platform() { return *platform_; }

    // Throws std::invalid_argument for lists that do not fit the model or each other. Gives the schedule's number.
    int32_t add_schedule(megakernel::TaskLists lists);

    // "" or why the pipelined CUDA kernel would not run a schedule. Throws std::invalid_argument for one that was not
    // added.
    std::string not_pipelined(int32_t schedule) const;

    // Gives the quantum's number. Throws std::invalid_argument for a schedule that was not added, or steps < 1.
    uint32_t queue(int32_t schedule, int32_t steps, const megakernel::ExecutorOptions& options);

    // Forgets the quanta that no call has taken, after a call that failed before it came here.
    void drop_queued();

    // All quanta queued so far end after the step that they are in.
    void stop();

    // Ends one row of a quantum. Throws std::invalid_argument for a row that no batch has.
    void cancel(int32_t row, uint32_t quantum);

    // Takes the entries that are there; waits up to timeout_s for the first one, unless `quantum` has finished.
    std::vector<megakernel::TokenEntry> take_entries(uint32_t quantum, double timeout_s);

    // Quanta up to this number have ended; no entry of theirs comes after this was read.
    uint32_t finished() const;

    // What went wrong in a quantum whose call has ended; "" for nothing, also of quanta before the one that failed
    // last.
    std::string error(uint32_t quantum) const;

    // For the handler: takes the next quantum, and after its call says what went wrong in it, "" for nothing.
    std::optional<Quantum> begin_call();
    void end_call(const Quantum& quantum, const std::string& error);

    // No call finds the engine from now on. Stops the quanta that run, and waits for them.
    void close();

   private:
    DecodeEngine(megakernel::Model model, std::unique_ptr<DecodePlatform> platform);

    const megakernel::Model model_;
    const std::unique_ptr<DecodePlatform> platform_;
    int64_t id_ = 0;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable idle_;
    std::vector<std::shared_ptr<const megakernel::TaskLists>> schedules_;
    std::deque<Quantum> queue_;
    uint32_t queued_ = 0;  // quanta ever
    int32_t calls_ = 0;    // running
    uint32_t failed_ = 0;  // the last quantum that failed, and what it reported
    std::string error_;
};

}  // namespace north_jax
