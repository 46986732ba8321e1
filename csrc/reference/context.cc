#include "csrc/reference/context.h"

#include <cstring>

#include "csrc/megakernel/sampling.h"
#include "csrc/reference/report.h"
#include "csrc/reference/text.h"

namespace north_jax::megakernel {

Context::Context(const Model& model, const TaskLists& lists, const Batch& batch, Channel& channel, uint32_t quantum,
                 int32_t steps, const ExecutorOptions& options)
    : model(model),
      geometry(model.geometry),
      lists(lists),
      batch(batch),
      options(options),
      counters(lists.counter_needs, options.counter_origin),
      channel_(channel),
      quantum_(quantum),
      steps_(steps),
      claims_(lists.queue_names.size()),
      completed_(lists.tasks.size() / kDescriptorFields),
      decided_(any_live() ? 0 : -1) {
    const BufferPlace& search = lists.buffers[BUFFER_SEARCH];
    std::memset(batch.workspace + search.offset, 0, search.plane_bytes);
    poison();
}

void Context::fail(const Task& task, const std::string& what) const {
    throw Fault(text(describe(lists, task.number), ": ", what));
}

std::vector<int32_t> Context::live_rows(const Task& task) const {
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < task[FIELD_BATCH_COUNT]; ++i) {
        if (live(task[FIELD_BATCH_BEGIN] + i)) rows.push_back(task[FIELD_BATCH_BEGIN] + i);
    }
    return rows;
}

bool Context::is_asked_for(const Task& task) const {
    if (!task.operation().optional) return true;
    for (int32_t i = 0; i < task[FIELD_BATCH_COUNT]; ++i) {
        const RowSampling row{batch.rows + int64_t{task[FIELD_BATCH_BEGIN] + i} * kRowFields, geometry.vocabulary};
        if (task[FIELD_OPCODE] == SAMPLE_MASS ? row.in_mass() : row.in_pass(task[FIELD_SPLIT])) return true;
    }
    return false;
}

void Context::arrive(const Task& task, int32_t counter, int64_t count) {
    if (count == 0 || counters.arrive(counter, count, task.step)) return;
    fail(task, text("more arrivals than ", counters.need(counter), " at ", describe_counter(lists, counter)));
}

int32_t Context::page_number(const Task& task, int32_t row, int32_t position) const {
    const bool full = task[FIELD_WINDOW] == 0;
    const int32_t entries = full ? batch.full_entries : batch.sliding_entries;
    const int32_t* table = full ? batch.full_table : batch.sliding_table;
    const int32_t page = entries > 0 ? table[int64_t{row} * entries + position / kPageTokens % entries] : -1;
    const int32_t pages = batch.pools[task[FIELD_POOL]].pages;
    if (page < 0 || page >= pages) {
        fail(task, text("row ", row, " has page ", page, " for position ", position, " in the ",
                        full ? "full" : "sliding", " table, pool ", task[FIELD_POOL], " has ", pages, " pages"));
    }
    return page;
}

bool Context::any_live() const {
    for (int32_t row = 0; row < lists.batch; ++row) {
        if (live(row)) return true;
    }
    return false;
}

void Context::poison() const {
    // What is read before it is written shows: NaN as either type of weights, and as int32 a number far below 0.
    // Of SEARCH, the states of the ranges alone: its histograms begin with what SAMPLE_DRAW left.
    const BufferPlace& search = lists.buffers[BUFFER_SEARCH];
    const int64_t after = search.offset + search.plane_bytes, of_row = search.plane_bytes / lists.batch;
    const int64_t histograms = int64_t{kPasses} * kBins * sizeof(uint64_t);
    std::memset(batch.workspace, 0xFF, search.offset);
    std::memset(batch.workspace + after, 0xFF, lists.workspace_bytes - after);
    for (int64_t row = search.offset; row < after; row += of_row) {
        std::memset(batch.workspace + row + histograms, 0xFF, of_row - histograms);
    }
    const uint32_t pattern = 0xFFA5FFA5;
    for (const Buffer name : {BUFFER_TOPK, BUFFER_ROUTES, BUFFER_RANGE_BEST}) {
        const BufferPlace& place = lists.buffers[name];
        for (int64_t i = 0; i < place.planes * place.plane_bytes; i += sizeof(pattern)) {
            std::memcpy(batch.workspace + place.offset + i, &pattern, sizeof(pattern));
        }
    }
}

void Context::end_step(const Task& task) {
    for (int32_t other = 0; other < static_cast<int32_t>(completed_.size()); ++other) {
        if (other == task.number || is_complete(other, task.step)) continue;
        fail(task, text("the step ended before ", describe(lists, other), " was complete"));
    }
    for (int32_t counter = 0; counter < counters.size(); ++counter) {
        const int32_t arrived = counters.arrived(counter, task.step);
        if (arrived == counters.need(counter)) continue;
        fail(task, text("the step ended with ", arrived, " of ", counters.need(counter), " arrivals at ",
                        describe_counter(lists, counter)));
    }
    for (int32_t i = 0; i < task[FIELD_ROW_COUNT]; ++i) {
        claims_[task[FIELD_QUEUE] + i].store(0, std::memory_order_relaxed);
    }
    const int32_t next = task.step + 1;
    const bool over = next == steps_ || stopped() || !any_live();
    if (!over) poison();
    decided_.store(over ? -1 : next, std::memory_order_release);
}

bool Context::publish(int32_t step, int32_t row, int32_t token, Finish finish) {
    const std::lock_guard lock(ring_);
    const uint64_t written = channel_.written;  // the host never writes it
    if (written - std::atomic_ref(channel_.read).load(std::memory_order_acquire) >= kRingEntries) return false;
    TokenEntry& entry = channel_.ring[written % kRingEntries];
    entry = {quantum_, step, parameter(row, ROW_SLOT), token, finish, -1, 0, {}, {}};
    if (token >= 0 && parameter(row, ROW_LOGPROBS) > 0) {
        entry.alternatives = parameter(row, ROW_LOGPROBS) - 1;
        entry.logprob = float_of(parameter(row, ROW_LOGPROB));
        for (int32_t i = 0; i < entry.alternatives; ++i) {
            entry.top_token[i] = parameter(row, static_cast<Row>(ROW_TOP_TOKEN + i));
            entry.top_logprob[i] = float_of(parameter(row, static_cast<Row>(ROW_TOP_LOGPROB + i)));
        }
    }
    std::atomic_ref(channel_.written).store(written + 1, std::memory_order_release);
    return true;
}

bool Context::stopped() const {  // By difference: quanta are numbered without end.
    return static_cast<int32_t>(std::atomic_ref(channel_.stop).load(std::memory_order_acquire) - quantum_) >= 0;
}

bool Context::cancelled(int32_t row) const {
    return std::atomic_ref(channel_.cancel[row]).load(std::memory_order_acquire) == quantum_;
}

}  // namespace north_jax::megakernel
