// Runs the kernel's sampling on a CPU: test_cuda_sampling.py builds this and writes its input.
//
//   sampling IN OUT
//
// The files are sequences of arrays (arrays.h). In: sizes (batch, vocabulary, ranges, steps), rows, logits, counts,
// biases, masks. Out, for every step: rows, counts, the adjusted logits, ring entries.
#include <memory>

#include "arrays.h"
#include "csrc/megakernel/operations/draw.cuh"
#include "csrc/megakernel/operations/step.cuh"

using namespace north_jax::megakernel;

namespace {

constexpr int kThreads = 128;

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    std::ifstream in(argv[1], std::ios::binary);
    std::ofstream out(argv[2], std::ios::binary);
    const auto sizes = read<int32_t>(in);
    const int batch = sizes[0], vocabulary = sizes[1], ranges = sizes[2], steps = sizes[3];
    auto rows = read<int32_t>(in);
    const auto logits = read<float>(in);
    auto counts = read<int32_t>(in);
    const auto biases = read<int32_t>(in);
    const auto masks = read<uint32_t>(in);

    const int blocks = (vocabulary + kSampleBlock - 1) / kSampleBlock;
    DevicePlan plan{};
    plan.geometry.vocabulary = vocabulary;
    plan.batch = batch;
    int64_t end = 0;
    const auto place = [&](Buffer name, int64_t bytes) {
        plan.buffers[name] = {end, bytes, 1, 0};
        end += (bytes + 255) / 256 * 256;
    };
    place(BUFFER_LOGITS, int64_t{batch} * vocabulary * 4);
    place(BUFFER_RANGE_BEST, int64_t{batch} * ranges * kMaxLogprobs * sizeof(Best));
    place(BUFFER_SEARCH, batch * SearchBuffer::kBytes);
    place(BUFFER_MASS, int64_t{batch} * blocks * sizeof(BlockMass));
    std::vector<uint64_t> workspace(end / 8, 0);
    DeviceBatch operands{};
    operands.rows = rows.data();
    operands.workspace = reinterpret_cast<std::byte*>(workspace.data());
    operands.counts = counts.data();
    operands.biases = biases.data();
    operands.masks = masks.data();
    uint32_t words[3] = {};
    const DeviceWords device_words{nullptr, nullptr, words, words + 1, words + 2};
    const auto channel = std::make_unique<Channel>();
    DeviceFault fault{};
    const Quantum quantum{1, steps, 1};
    SampleScratch scratch;
    uint32_t live = live_rows(plan, operands);

    for (int step = 0; step < steps; ++step) {
        const auto run = [&](std::vector<std::pair<Field, int32_t>> given, auto body) {
            int32_t fields[kDescriptorFields] = {};
            fields[FIELD_BATCH_COUNT] = batch;
            fields[FIELD_DEALERS] = ranges;
            fields[FIELD_INPUT] = BUFFER_LOGITS;
            fields[FIELD_INPUT_2] = BUFFER_RANGE_BEST;
            for (const auto& [field, value] : given) fields[field] = value;
            fibers::run(1, kThreads, 0, [&] {
                Context c{plan, device_words, operands, channel.get(), &fault, quantum, 0};
                c.step = step;
                c.fields = fields;
                if (!body(c, Team{static_cast<int>(threadIdx.x), kThreads, 0})) std::exit(4);
            });
        };
        const auto each_range = [&](std::vector<std::pair<Field, int32_t>> given, auto body) {
            for (int range = 0; range < ranges; ++range) {
                const int first = std::min(blocks * range / ranges * kSampleBlock, vocabulary);
                const int last = std::min(blocks * (range + 1) / ranges * kSampleBlock, vocabulary);
                auto all = given;
                all.insert(all.end(),
                           {{FIELD_DEALER, range}, {FIELD_ROW_BEGIN, first}, {FIELD_ROW_COUNT, last - first}});
                run(all, body);
            }
        };
        float* current = reinterpret_cast<float*>(operands.workspace + plan.buffers[BUFFER_LOGITS].offset);
        std::copy(logits.begin(), logits.end(), current);
        each_range({}, [&](const Context& c, const Team& team) {
            for (int b = team.warp(); b < batch; b += team.warps()) {
                if (!c.live(b)) continue;
                Best* best = c.buffer<Best>(FIELD_INPUT_2) + (b * ranges + c.field(FIELD_DEALER)) * kMaxLogprobs;
                finish_range(c, b, current + int64_t{b} * vocabulary, c.field(FIELD_ROW_BEGIN),
                             c.field(FIELD_ROW_COUNT), best, team.lane());
            }
            return true;
        });
        for (int pass = 0; pass < kPasses; ++pass) {
            each_range({{FIELD_SPLIT, pass}, {FIELD_OUTPUT, BUFFER_SEARCH}},
                       [&](const Context& c, const Team& team) { return sample_histogram(c, team, &scratch); });
        }
        each_range({{FIELD_INPUT_3, BUFFER_SEARCH}, {FIELD_OUTPUT, BUFFER_MASS}},
                   [&](const Context& c, const Team& team) { return sample_mass(c, team); });
        run({{FIELD_INPUT_3, BUFFER_MASS}, {FIELD_OUTPUT, BUFFER_SEARCH}},
            [&](const Context& c, const Team& team) { return sample_draw(c, team, &scratch); });
        run({}, [&](const Context& c, const Team& team) { return end_step(c, team, &live); });
        write(out, rows.data(), rows.size());
        write(out, counts.data(), counts.size());
        write(out, current, logits.size());
        write(out, channel->ring + channel->read, channel->written - channel->read);
        channel->read = channel->written;
    }
    return 0;
}
