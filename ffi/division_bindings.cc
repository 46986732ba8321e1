// What every SM computes alike (csrc/megakernel), so that tests can compare it with its Python form.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "csrc/megakernel/division.h"
#include "csrc/megakernel/routing.h"
#include "csrc/megakernel/threefry.h"
#include "ffi/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace north_jax {
namespace {

using Triple = std::tuple<int32_t, int32_t, int32_t>;
template <typename T, typename Shape>
using Array = nb::ndarray<const T, Shape, nb::c_contig, nb::device::cpu>;

std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t> attention_splits(int32_t position, int32_t window) {
    const auto splits = megakernel::attention_splits(position, window);
    return {splits.count, splits.first_page, splits.pages, splits.extra, splits.begin, splits.end};
}

std::tuple<int32_t, int32_t> split_positions(int32_t position, int32_t window, int32_t split) {
    const auto splits = megakernel::attention_splits(position, window);
    return {splits.first(split), splits.last(split)};
}

std::vector<Triple> attention_items(Array<int32_t, nb::shape<-1, megakernel::kRowFields>> rows, int32_t begin,
                                    int32_t count, int32_t kv_heads, int32_t window) {
    std::vector<Triple> items;
    const int32_t total = megakernel::attention_item_count(rows.data(), begin, count, kv_heads, window);
    for (int32_t number = 0; number < total; ++number) {
        const auto item = megakernel::attention_item(rows.data(), begin, kv_heads, window, number);
        items.emplace_back(item.row, item.head, item.split);
    }
    return items;
}

std::tuple<int32_t, int32_t> expert_item(int32_t tiles, int32_t number) {
    const auto item = megakernel::expert_item(tiles, number);
    return {item.rank, item.tile};
}

Triple dealt(int32_t items, int32_t dealer, int32_t dealers, int32_t round_begin, int32_t round_end) {
    const auto range = megakernel::dealt(items, dealer, dealers, round_begin, round_end);
    return {range.first, range.end, range.step};
}

std::vector<int32_t> routes(Array<int32_t, nb::ndim<1>> chosen, int32_t experts) {
    const auto assignments = static_cast<int32_t>(chosen.size());
    std::vector<int32_t> result(megakernel::routes_size(experts, assignments), -1);
    megakernel::sort_assignments(chosen.data(), assignments, megakernel::Routes<int32_t>{result.data(), experts});
    return result;
}

std::tuple<std::vector<int32_t>, std::vector<float>> choose_experts(Array<float, nb::ndim<1>> logits, int32_t k,
                                                                    bool softmax, bool renormalise) {
    std::vector<int32_t> chosen(k);
    std::vector<float> weights(k);
    megakernel::choose_experts(logits.data(), static_cast<int32_t>(logits.size()), k, softmax, renormalise,
                               chosen.data(), weights.data());
    return {chosen, weights};
}

float uniform(uint32_t seed_high, uint32_t seed_low, uint32_t position, uint32_t index) {
    return megakernel::uniform({seed_high, seed_low}, position, index);
}

}  // namespace

void bind_division(nb::module_& parent) {
    nb::module_ module = parent.def_submodule("division");
    module.def("attention_splits", &attention_splits, "position"_a, "window"_a);
    module.def("split_positions", &split_positions, "position"_a, "window"_a, "split"_a);
    module.def("attention_items", &attention_items, "rows"_a, "begin"_a, "count"_a, "kv_heads"_a, "window"_a);
    module.def("expert_item", &expert_item, "tiles"_a, "number"_a);
    module.def("dealt", &dealt, "items"_a, "dealer"_a, "dealers"_a, "round_begin"_a, "round_end"_a);
    module.def("routes", &routes, "chosen"_a, "experts"_a);
    module.def("choose_experts", &choose_experts, "logits"_a, "k"_a, "softmax"_a, "renormalise"_a);
    module.def("uniform", &uniform, "seed_high"_a, "seed_low"_a, "position"_a, "index"_a);
}

}  // namespace north_jax
