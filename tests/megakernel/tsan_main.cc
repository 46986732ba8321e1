// Runs a plan file on the CPU executor with several seeds, for ThreadSanitizer: test_thread_sanitizer.py builds this
// with csrc/reference and writes the file.
//
//   tsan_main PLAN THREADS SEEDS
//
// Exits with 1 for lists that are refused, after a fault, or where two seeds draw different tokens.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/reference/executor.h"
#include "csrc/reference/validate.h"

namespace {

using namespace north_jax::megakernel;

// The file is a sequence of arrays: their size in bytes as int64, then the bytes.
class PlanFile {
   public:
    explicit PlanFile(const char* path) : file_(path, std::ios::binary) { file_.exceptions(std::ios::failbit); }

    template <typename T>
    std::vector<T> array() {
        int64_t bytes = 0;
        file_.read(reinterpret_cast<char*>(&bytes), sizeof(bytes));
        std::vector<T> result(bytes / sizeof(T));
        file_.read(reinterpret_cast<char*>(result.data()), bytes);
        return result;
    }

    std::vector<std::string> lines() {
        const std::vector<char> bytes = array<char>();
        std::istringstream text(std::string(bytes.begin(), bytes.end()));
        std::vector<std::string> result;
        for (std::string line; std::getline(text, line);) result.push_back(line);
        return result;
    }

   private:
    std::ifstream file_;
};

struct Plan {
    Model model;
    TaskLists lists;
    int32_t steps;
    std::vector<int32_t> rows, full_table, sliding_table;
    std::vector<std::vector<std::byte>> weights, pools;
    std::vector<int32_t> pool_pages;
};

Plan read_plan(const char* path) {
    PlanFile file(path);
    Plan plan;
    const auto sizes = file.array<int32_t>();  // geometry, flags, type, batch, steps
    const auto constants = file.array<float>();
    const auto* s = sizes.data();
    plan.model.geometry = {s[0], s[1], s[2],         s[3],         s[4],       s[5],       s[6],      s[7],
                           s[8], s[9], constants[0], constants[1], s[10] != 0, s[11] != 0, s[12] != 0};
    plan.model.type = static_cast<Type>(s[13]);
    plan.lists.batch = s[14];
    plan.steps = s[15];
    plan.model.frequencies = file.array<float>();
    const auto shapes = file.array<int64_t>();  // rows, columns of each weight
    for (size_t i = 0; i < shapes.size(); i += 2) {
        plan.weights.push_back(file.array<std::byte>());
        plan.model.weights.push_back({plan.weights.back().data(), shapes[i], shapes[i + 1]});
    }
    TaskLists& lists = plan.lists;
    lists.tasks = file.array<int32_t>();
    lists.begin = file.array<int32_t>();
    lists.counter_needs = file.array<int32_t>();
    lists.counter_names = file.lines();
    lists.queue_names = file.lines();
    const auto places = file.array<int64_t>();  // offset, plane_bytes, planes, leading of each buffer; workspace_bytes
    for (int32_t i = 0; i < kBufferCount; ++i) {
        const int64_t* place = &places[4 * i];
        lists.buffers[i] = {place[0], place[1], static_cast<int32_t>(place[2]), static_cast<int32_t>(place[3])};
    }
    lists.workspace_bytes = places.back();
    plan.rows = file.array<int32_t>();
    plan.full_table = file.array<int32_t>();
    plan.sliding_table = file.array<int32_t>();
    plan.pool_pages = file.array<int32_t>();
    for (size_t i = 0; i < plan.pool_pages.size(); ++i) plan.pools.push_back(file.array<std::byte>());
    return plan;
}

// A quantum on copies of what it changes. Gives the fault, and the rows as they are afterwards.
std::string run(const Plan& plan, const ExecutorOptions& options, std::vector<int32_t>& rows) {
    rows = plan.rows;
    auto pools = plan.pools;
    std::vector<std::byte> workspace(plan.lists.workspace_bytes);
    const auto channel = std::make_unique<Channel>();
    Batch batch;
    batch.rows = rows.data();
    batch.full_table = plan.full_table.data();
    batch.sliding_table = plan.sliding_table.data();
    batch.full_entries = static_cast<int32_t>(plan.full_table.size()) / plan.lists.batch;
    batch.sliding_entries = static_cast<int32_t>(plan.sliding_table.size()) / plan.lists.batch;
    for (size_t i = 0; i < pools.size(); ++i) batch.pools.push_back({pools[i].data(), plan.pool_pages[i]});
    batch.workspace = workspace.data();
    return run_quantum(plan.model, plan.lists, batch, *channel, 1, plan.steps, options);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const Plan plan = read_plan(argv[1]);
    if (const std::string wrong = validate_lists(plan.model, plan.lists); !wrong.empty()) {
        std::fprintf(stderr, "%s\n", wrong.c_str());
        return 1;
    }
    std::vector<int32_t> first;
    for (int seed = 0; seed < std::atoi(argv[3]); ++seed) {
        std::vector<int32_t> rows;
        const std::string fault = run(plan, {.threads = std::atoi(argv[2]), .seed = static_cast<uint64_t>(seed)}, rows);
        if (!fault.empty()) std::fprintf(stderr, "seed %d: %s\n", seed, fault.c_str());
        if (seed == 0) first = rows;
        if (!fault.empty() || rows != first) return 1;
    }
    return 0;
}
