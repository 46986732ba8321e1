#include "csrc/reference/machine.h"

namespace north_jax::megakernel {

Sm::Sm(Context& context, int32_t sm) : context_(context), sm_(sm) {
    for (int32_t number = context.lists.begin[sm]; number < context.lists.begin[sm + 1]; ++number) {
        const Operation& operation = task(number).operation();
        if (operation.lane == LANE_SIDE) {
            side_.push_back(number);
            continue;
        }
        load_.push_back(number);
        if (operation.lane != LANE_MATRIX) continue;
        if (operation.routed) routed_.push_back(matrix_.size());
        matrix_.push_back(number);
    }
}

void Sm::begin_step(int32_t step) {
    step_ = step;
    produced_ = loaded_ = loaded_matrix_ = stored_ = sided_ = 0;
    for (InFlight& flight : in_flight_) flight = {};
}

Outcome Sm::turn(Role role) {
    blocked_[static_cast<int32_t>(role)].reset();
    switch (role) {
        case Role::kProducer:
            return produce();
        case Role::kLoader:
            return load();
        case Role::kStorer:
            return store();
        default:
            return side();
    }
}

Outcome Sm::produce() {
    if (produced_ == routed_.size()) return Outcome::kDone;
    const size_t place = routed_[produced_];
    if (!has_room(place)) return Outcome::kBlocked;
    InFlight& flight = in_flight(place);
    const Task task = this->task(matrix_[place]);
    if (flight.run == nullptr) {
        if (!ready(Role::kProducer, task)) return Outcome::kBlocked;
        open(flight, task);
    } else if (claim(flight, task) == Outcome::kBlocked) {
        return Outcome::kBlocked;
    }
    if (flight.all_claimed) ++produced_;
    return Outcome::kProgress;
}

Outcome Sm::load() {
    if (loaded_ == load_.size()) return Outcome::kDone;
    const Task task = this->task(load_[loaded_]);
    if (task.operation().lane == LANE_MATRIX) return load_matrix_task();
    if (!ready(Role::kLoader, task)) return Outcome::kBlocked;
    run_task(context_, task);
    context_.complete(task);
    context_.arrive(task);
    ++loaded_;
    return Outcome::kProgress;
}

Outcome Sm::load_matrix_task() {
    if (!has_room(loaded_matrix_)) return Outcome::kBlocked;
    InFlight& flight = in_flight(loaded_matrix_);
    const Task task = this->task(load_[loaded_]);
    const Operation& operation = task.operation();
    if (flight.run == nullptr) {
        if (operation.routed || !ready(Role::kLoader, task)) return Outcome::kBlocked;
        open(flight, task);
    }
    const std::optional<int32_t> item = next_item(flight, task);
    if (item) {
        if (flight.staged.size() == kStages || !slice_ready(task, *flight.run, *item)) return Outcome::kBlocked;
        Stage& stage = flight.staged.emplace_back(Stage{*item, {}});
        flight.run->load(*item, stage.data);
        if (operation.claims) {
            flight.claimed.pop_front();
        } else {
            flight.items.first += flight.items.step;
        }
    } else if (!flight.all_claimed) {
        return operation.routed ? Outcome::kBlocked : claim(flight, task);
    }
    if (!next_item(flight, task) && flight.all_claimed) {
        flight.all_loaded = true;
        ++loaded_;
        ++loaded_matrix_;
    }
    return Outcome::kProgress;
}

Outcome Sm::store() {
    if (stored_ == matrix_.size()) return Outcome::kDone;
    InFlight& flight = in_flight(stored_);
    if (flight.staged.empty() && !flight.all_loaded) return Outcome::kBlocked;
    if (flight.all_loaded && flight.staged.size() <= 1) context_.complete(task(matrix_[stored_]));
    if (!flight.staged.empty()) {
        const Stage& stage = flight.staged.front();
        flight.run->consume(stage.item, stage.data);
        flight.staged.pop_front();
    }
    if (flight.staged.empty() && flight.all_loaded) {
        flight.run->finish();
        flight = {};
        ++stored_;
    }
    return Outcome::kProgress;
}

Outcome Sm::side() {
    if (sided_ == side_.size()) return Outcome::kDone;
    const Task task = this->task(side_[sided_]);
    if (!context_.is_asked_for(task)) {
        context_.complete(task);
        context_.arrive(task);
        ++sided_;
        return Outcome::kProgress;
    }
    if (!ready(Role::kSide, task)) return Outcome::kBlocked;
    if (task[FIELD_OPCODE] == END_STEP) {
        context_.end_step(task);
        ++sided_;
        return Outcome::kProgress;
    }
    if (task[FIELD_OPCODE] == SAMPLE_DRAW) {
        const int32_t row = task[FIELD_BATCH_BEGIN] + side_row_;
        if (context_.live(row) && !draw_row(context_, task, row)) {
            blocked_[static_cast<int32_t>(Role::kSide)] = {task.number, -1, 0};
            return Outcome::kBlocked;
        }
        if (++side_row_ < task[FIELD_BATCH_COUNT]) return Outcome::kProgress;
        side_row_ = 0;
    } else {
        run_task(context_, task);
    }
    context_.complete(task);
    context_.arrive(task);
    ++sided_;
    return Outcome::kProgress;
}

Task Sm::task(int32_t number) const {
    return {&context_.lists.tasks[int64_t{number} * kDescriptorFields], number, sm_, step_};
}

void Sm::open(InFlight& flight, const Task& task) {
    flight.run = make_matrix_task(context_, task);
    flight.items = flight.run->open();
    flight.all_claimed = !task.operation().claims;
}

Outcome Sm::claim(InFlight& flight, const Task& task) {
    if (flight.claimed.size() == kStages) return Outcome::kBlocked;
    const int32_t item = context_.claim(task);
    if (item < flight.items.end) {
        flight.claimed.push_back(item);
    } else {
        flight.all_claimed = true;
    }
    return Outcome::kProgress;
}

std::optional<int32_t> Sm::next_item(InFlight& flight, const Task& task) const {
    if (!task.operation().claims) {
        if (flight.items.first >= flight.items.end) return std::nullopt;
        return flight.items.first;
    }
    if (flight.claimed.empty()) return std::nullopt;
    return flight.claimed.front();
}

bool Sm::ready(Role role, const Task& task) {
    for (int32_t i = 0; i < task[FIELD_WAIT_COUNT]; ++i) {
        if (!shows(role, task, task[FIELD_WAIT] + i, task[FIELD_WAIT_NEED])) return false;
    }
    return true;
}

bool Sm::slice_ready(const Task& task, const MatrixTask& run, int32_t item) {
    if (task[FIELD_SLICE_NEED] == 0) return true;
    return shows(Role::kLoader, task, task[FIELD_SLICE_WAIT] + run.slice(item), task[FIELD_SLICE_NEED]);
}

bool Sm::shows(Role role, const Task& task, int32_t counter, int32_t need) {
    if (context_.counters.shows(counter, need, task.step)) return true;
    blocked_[static_cast<int32_t>(role)] = {task.number, counter, need};
    return false;
}

}  // namespace north_jax::megakernel
