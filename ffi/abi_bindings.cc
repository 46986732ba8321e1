// The constants that the module was compiled with, so that a test can compare them with north_jax/megakernel/abi.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <utility>

#include "csrc/megakernel/abi.h"
#include "csrc/megakernel/channel.h"
#include "ffi/bindings.h"

namespace nb = nanobind;

namespace north_jax {
namespace {

using namespace megakernel;
using Named = std::initializer_list<std::pair<const char*, int32_t>>;

nb::dict dict(Named values) {
    nb::dict result;
    for (const auto& [name, value] : values) result[name] = value;
    return result;
}

template <size_t n>
nb::dict numbered(const char* const (&names)[n]) {
    nb::dict result;
    for (size_t i = 0; i < n; ++i) result[names[i]] = i;
    return result;
}

nb::dict constants() {
    nb::dict result = dict({{"DESCRIPTOR_FIELDS", kDescriptorFields},
                            {"ROW_FIELDS", kRowFields},
                            {"STOP_TOKENS", kStopTokens},
                            {"MAX_ROWS", kMaxRows},
                            {"MAX_SPLITS", kMaxSplits},
                            {"MAX_TOP_K", kMaxTopK},
                            {"PAGE_TOKENS", kPageTokens},
                            {"SAMPLE_BLOCK", kSampleBlock},
                            {"MAX_BIASES", kMaxBiases},
                            {"MAX_LOGPROBS", kMaxLogprobs},
                            {"PROMPT_SEEN", kPromptSeen},
                            {"PASSES", kPasses},
                            {"PASS_BITS", kPassBits},
                            {"SEARCH_WORDS", kSearchWords},
                            {"MASS_WORDS", kMassWords},
                            {"RING_ENTRIES", kRingEntries}});
    result["Lane"] = dict({{"MATRIX", LANE_MATRIX}, {"LOADER", LANE_LOADER}, {"SIDE", LANE_SIDE}});
    result["Field"] = numbered(kFieldNames);
    result["Buffer"] = numbered(kBufferNames);
    result["Weight"] = dict({{"NORM", WEIGHT_NORM},
                             {"QKV", WEIGHT_QKV},
                             {"OUT", WEIGHT_OUT},
                             {"ROUTER", WEIGHT_ROUTER},
                             {"GATE_UP", WEIGHT_GATE_UP},
                             {"DOWN", WEIGHT_DOWN},
                             {"EMBED", WEIGHT_EMBED},
                             {"FINAL_NORM", WEIGHT_FINAL_NORM}});
    result["Row"] = dict({{"TOKEN", ROW_TOKEN},         {"POSITION", ROW_POSITION},
                          {"REMAINING", ROW_REMAINING}, {"FINISH", ROW_FINISH},
                          {"SLOT", ROW_SLOT},           {"TEMPERATURE", ROW_TEMPERATURE},
                          {"TOP_K", ROW_TOP_K},         {"TOP_P", ROW_TOP_P},
                          {"MIN_P", ROW_MIN_P},         {"SEED_HIGH", ROW_SEED_HIGH},
                          {"SEED_LOW", ROW_SEED_LOW},   {"PRESENCE", ROW_PRESENCE},
                          {"FREQUENCY", ROW_FREQUENCY}, {"REPETITION", ROW_REPETITION},
                          {"HISTORY", ROW_HISTORY},     {"LOGPROBS", ROW_LOGPROBS},
                          {"STOP", ROW_STOP},           {"BIAS_COUNT", ROW_BIAS_COUNT},
                          {"MASKED", ROW_MASKED},       {"LOGPROB", ROW_LOGPROB},
                          {"TOP_TOKEN", ROW_TOP_TOKEN}, {"TOP_LOGPROB", ROW_TOP_LOGPROB}});
    result["Finish"] = dict({{"NONE", FINISH_NONE},
                             {"STOP", FINISH_STOP},
                             {"LENGTH", FINISH_LENGTH},
                             {"CANCELLED", FINISH_CANCELLED},
                             {"ERROR", FINISH_ERROR}});
    return result;
}

// (name, lane, routed, claims, optional, mask of the fields that are read) by opcode.
nb::list operations() {
    nb::list result;
    for (const Operation& operation : kOperations) {
        result.append(nb::make_tuple(operation.name, static_cast<int32_t>(operation.lane), operation.routed,
                                     operation.claims, operation.optional, operation.fields));
    }
    return result;
}

}  // namespace

void bind_abi(nb::module_& module) {
    module.def("abi_constants", &constants);
    module.def("abi_operations", &operations);
}

}  // namespace north_jax
