// One SM: the roles that walk its task list, each in its own order, as on the GPU.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/reference/context.h"
#include "csrc/reference/operations/operation.h"
#include "csrc/reference/report.h"

namespace north_jax::megakernel {

// PRODUCER decides the items of routed MATRIX tasks. LOADER stages what MATRIX tasks read, and runs the tasks of its
// own lane. STORER computes, stores and arrives for MATRIX tasks. SIDE runs the tasks of its lane.
enum class Role : int32_t { kProducer = 0, kLoader, kStorer, kSide };
inline constexpr int32_t kRoles = 4;

enum class Outcome {
    kProgress,  // something happened
    kBlocked,   // nothing can happen before others make progress
    kDone,      // the role is through with the step's list
};

class Sm {
   public:
    Sm(Context& context, int32_t sm);

    void begin_step(int32_t step);

    // One event of a role. Events are what the scheduler interleaves: nothing comes between the parts of one.
    Outcome turn(Role role);

    // What a role waited for when its last turn was blocked; nothing where another role of the SM was in its way.
    const std::optional<BlockedWait>& blocked(Role role) const { return blocked_[static_cast<int32_t>(role)]; }

   private:
    static constexpr int32_t kAhead = 4;  // tasks between the first load and the last store
    static constexpr size_t kStages = 4;  // items of a task claimed but not loaded, and loaded but not consumed

    struct Stage {
        int32_t item;
        std::vector<float> data;
    };

    // A MATRIX task between its opening and its last store.
    struct InFlight {
        std::unique_ptr<MatrixTask> run;  // none: not open yet
        Dealt items{};                    // not yet claimed, or not yet loaded where nothing is claimed
        std::deque<int32_t> claimed;      // not yet loaded
        std::deque<Stage> staged;         // not yet consumed
        bool all_claimed = false;
        bool all_loaded = false;
    };

    Outcome produce();
    Outcome load();
    Outcome load_matrix_task();
    Outcome store();
    Outcome side();

    Task task(int32_t number) const;
    InFlight& in_flight(size_t place) { return in_flight_[place % kAhead]; }
    bool has_room(size_t place) const { return place < stored_ + kAhead; }

    void open(InFlight& flight, const Task& task);
    Outcome claim(InFlight& flight, const Task& task);
    std::optional<int32_t> next_item(InFlight& flight, const Task& task) const;

    // Whether the task's counters show what it needs; notes what is missing.
    bool ready(Role role, const Task& task);
    bool slice_ready(const Task& task, const MatrixTask& run, int32_t item);
    bool shows(Role role, const Task& task, int32_t counter, int32_t need);

    Context& context_;
    const int32_t sm_;
    int32_t step_ = 0;
    std::vector<int32_t> matrix_;  // numbers of the tasks
    std::vector<size_t> routed_;   // places in matrix_
    std::vector<int32_t> load_;    // MATRIX and LOADER tasks
    std::vector<int32_t> side_;
    size_t produced_ = 0;  // progress in routed_, load_, matrix_ and side_
    size_t loaded_ = 0;
    size_t loaded_matrix_ = 0;  // MATRIX tasks among loaded_
    size_t stored_ = 0;
    size_t sided_ = 0;
    int32_t side_row_ = 0;  // rows of the SAMPLE_DRAW at hand that are drawn
    std::array<InFlight, kAhead> in_flight_;
    std::array<std::optional<BlockedWait>, kRoles> blocked_;
};

}  // namespace north_jax::megakernel
