#include "csrc/reference/report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "csrc/reference/context.h"
#include "csrc/reference/text.h"
#include "csrc/reference/validate.h"

namespace north_jax::megakernel {
namespace {

constexpr size_t kWaits = 6;     // that a report describes
constexpr size_t kArrivers = 6;  // that it names for one of them

// All waits for one counter.
struct Wait {
    BlockedWait first;
    int32_t others = 0;
    std::vector<int32_t> missing;                                  // tasks that have not arrived
    std::map<std::pair<int32_t, int32_t>, int32_t> missing_waves;  // (opcode, layer) → dynamic tasks not complete

    bool hopeless() const { return missing.empty() && missing_waves.empty(); }
};

Wait find_missing(const Context& context, const BlockedWait& blocked, int32_t step) {
    Wait wait;
    wait.first = blocked;
    if (blocked.counter < 0) return wait;
    const auto& tasks = context.lists.tasks;
    for (int32_t task = 0; task < static_cast<int32_t>(tasks.size() / kDescriptorFields); ++task) {
        const int32_t* fields = &tasks[int64_t{task} * kDescriptorFields];
        const CounterRange range = arrivals_of(context.geometry, fields);
        const bool arrives = blocked.counter >= range.first && blocked.counter < range.first + range.count;
        if (!arrives || context.is_complete(task, step)) continue;
        if (range.dynamic) {
            ++wait.missing_waves[{fields[FIELD_OPCODE], fields[FIELD_LAYER]}];
        } else {
            wait.missing.push_back(task);
        }
    }
    return wait;
}

std::string describe_wait(const Context& context, const Wait& wait, int32_t step) {
    const TaskLists& lists = context.lists;
    const std::string others = wait.others ? text(" and ", wait.others, " others wait") : " waits";
    const auto [task, counter, need] = wait.first;
    if (counter < 0) return text(describe(lists, task), others, " for the host to take tokens from the ring");
    std::string result = text(describe(lists, task), others, " for ", describe_counter(lists, counter), ": ",
                              context.counters.arrived(counter, step), " of ", need, " arrivals");
    if (wait.hopeless()) return result + "; nobody is left to arrive";
    result += "; missing: ";
    std::string separator;
    for (size_t i = 0; i < std::min(wait.missing.size(), kArrivers); ++i) {
        result += separator + describe(lists, wait.missing[i]);
        separator = ", ";
    }
    if (wait.missing.size() > kArrivers) result += text(" and ", wait.missing.size() - kArrivers, " more");
    for (const auto& [wave, count] : wait.missing_waves) {
        const auto& [opcode, layer] = wave;
        result += text(separator, count, " ", kOperations[opcode].name, " tasks of layer ", layer);
        separator = ", ";
    }
    return result;
}

}  // namespace

std::string describe(const TaskLists& lists, int32_t task) {
    const int64_t tasks = static_cast<int64_t>(lists.tasks.size() / kDescriptorFields);
    if (task < 0 || task >= tasks) return text("task ", task);
    const int32_t* fields = &lists.tasks[int64_t{task} * kDescriptorFields];
    const int32_t opcode = fields[FIELD_OPCODE];
    const auto next = std::upper_bound(lists.begin.begin(), lists.begin.end(), task);
    const auto sm = next - lists.begin.begin() - 1;
    if (opcode <= 0 || opcode >= kOpcodeCount) return text("task ", task, " (opcode ", opcode, " on SM ", sm, ")");
    const bool layered = kOperations[opcode].fields >> FIELD_LAYER & 1;
    const std::string layer = layered ? text(" of layer ", fields[FIELD_LAYER]) : "";
    return text("task ", task, " (", kOperations[opcode].name, layer, " on SM ", sm, ")");
}

std::string describe_counter(const TaskLists& lists, int32_t counter) {
    return text("counter ", counter, " (", lists.counter_names[counter], ")");
}

std::string describe_deadlock(const Context& context, const std::vector<BlockedWait>& blocked, int32_t step) {
    std::map<int32_t, Wait> by_counter;
    for (const BlockedWait& one : blocked) {
        const auto found = by_counter.find(one.counter);
        if (found == by_counter.end()) {
            by_counter.emplace(one.counter, find_missing(context, one, step));
        } else {
            ++found->second.others;
        }
    }
    std::vector<Wait> waits;
    for (auto& [counter, wait] : by_counter) waits.push_back(std::move(wait));
    // What nobody can end comes first: the rest follows from it.
    std::stable_partition(waits.begin(), waits.end(), [](const Wait& wait) { return wait.hopeless(); });
    std::string result = text("no progress for ", context.options.timeout_s, " s in step ", step, ":");
    for (size_t i = 0; i < std::min(waits.size(), kWaits); ++i) {
        result += "\n  " + describe_wait(context, waits[i], step);
    }
    if (waits.size() > kWaits) result += text("\n  and waits for ", waits.size() - kWaits, " other counters");
    if (waits.empty()) result += " every task waits for another of its own SM";
    return result;
}

}  // namespace north_jax::megakernel
