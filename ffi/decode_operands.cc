#include "ffi/decode_operands.h"

#include <limits>
#include <string>

#include "ffi/operands.h"

namespace north_jax {
namespace {

namespace ffi = ::xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;
using megakernel::Batch;
using megakernel::Model;

constexpr size_t kBeforePages = 7;  // operands: rows, workspace, counts, full_table, sliding_table, biases, masks
constexpr size_t kResultsBeforePages = 3;  // rows, workspace, counts

// Requires result `number` to lie in the operand's buffer, and gives that.
void* in_place(OperandCheck& check, const char* name, AnyBuffer operand, const ffi::RemainingRets& results,
               size_t number) {
    const auto result = results.get<AnyBuffer>(number);
    check.require(result.has_value() && (*result)->untyped_data() == operand.untyped_data() &&
                      (*result)->size_bytes() == operand.size_bytes(),
                  "result " + std::to_string(number) + " does not share the buffer of " + name);
    return operand.untyped_data();
}

// A table [B, entries].
const int32_t* page_table(OperandCheck& check, const char* name, AnyBuffer table, int64_t batch, int32_t& entries) {
    const Shape shape = shape_of(table);
    check.require(table.element_type() == DataType::S32 && shape.size() == 2 && shape[0] == batch && shape[1] >= 1 &&
                      shape[1] <= std::numeric_limits<int32_t>::max(),
                  name, table, "S32 [" + std::to_string(batch) + ", entries], at least one");
    entries = check.failed() ? 0 : static_cast<int32_t>(shape[1]);
    return static_cast<const int32_t*>(table.untyped_data());
}

}  // namespace

ffi::ErrorOr<Batch> decode_operands(const Model& model, const megakernel::TaskLists& lists,
                                    const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
    const auto layers = static_cast<size_t>(model.geometry.layers);
    OperandCheck check("north_jax.decode");
    check.require(operands.size() == kBeforePages + layers && results.size() == kResultsBeforePages + layers,
                  std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) +
                      " results, expected " + std::to_string(kBeforePages + layers) + " and " +
                      std::to_string(kResultsBeforePages + layers) + " for " + std::to_string(layers) + " layers");
    if (check.failed()) return ffi::Unexpected(check.error());

    Batch batch;
    const AnyBuffer rows = *operands.get<AnyBuffer>(0), workspace = *operands.get<AnyBuffer>(1);
    check.require("rows", rows, DataType::S32, {lists.batch, megakernel::kRowFields});
    batch.rows = static_cast<int32_t*>(in_place(check, "rows", rows, results, 0));
    check.require(workspace.element_type() == DataType::U8 && workspace.dimensions().size() == 1 &&
                      workspace.dimensions()[0] >= lists.workspace_bytes,
                  "workspace", workspace,
                  describe(DataType::U8, {lists.workspace_bytes}) + " or more for this quantum's schedule");
    batch.workspace = static_cast<std::byte*>(in_place(check, "workspace", workspace, results, 1));
    batch.full_table = page_table(check, "full_table", *operands.get<AnyBuffer>(3), lists.batch, batch.full_entries);
    batch.sliding_table =
        page_table(check, "sliding_table", *operands.get<AnyBuffer>(4), lists.batch, batch.sliding_entries);

    const AnyBuffer counts = *operands.get<AnyBuffer>(2), biases = *operands.get<AnyBuffer>(5),
                    masks = *operands.get<AnyBuffer>(6);
    const int64_t vocabulary = model.geometry.vocabulary;
    const int64_t histories = shape_of(counts).empty() ? 0 : shape_of(counts)[0];
    check.require(histories <= std::numeric_limits<int32_t>::max(), "counts", counts, "fewer than 2^31 rows");
    check.require("counts", counts, DataType::S32, {histories, vocabulary});
    check.require("biases", biases, DataType::S32, {lists.batch, megakernel::kMaxBiases, 2});
    check.require("masks", masks, DataType::U32, {lists.batch, (vocabulary + 31) / 32});
    batch.counts = static_cast<int32_t*>(in_place(check, "counts", counts, results, 2));
    batch.histories = static_cast<int32_t>(histories);
    batch.biases = static_cast<const int32_t*>(biases.untyped_data());
    batch.masks = static_cast<const uint32_t*>(masks.untyped_data());

    const DataType dtype = model.type == megakernel::Type::kBFloat16 ? DataType::BF16 : DataType::F32;
    for (size_t layer = 0; layer < layers; ++layer) {
        const std::string name = "pages of layer " + std::to_string(layer);
        const AnyBuffer pages = *operands.get<AnyBuffer>(kBeforePages + layer);
        const Shape shape = shape_of(pages);
        const int64_t count = shape.empty() ? 0 : shape[0];
        check.require(count >= 1 && count <= std::numeric_limits<int32_t>::max(), name.c_str(), pages,
                      "[num_pages, 2, K, 64, d] with at least one page, and fewer than 2^31");
        check.require(name.c_str(), pages, dtype,
                      {count, 2, model.geometry.kv_heads, megakernel::kPageTokens, model.geometry.head_dim});
        void* data = in_place(check, name.c_str(), pages, results, kResultsBeforePages + layer);
        batch.pools.push_back({data, static_cast<int32_t>(count)});
    }
    if (check.failed()) return ffi::Unexpected(check.error());
    return batch;
}

}  // namespace north_jax
