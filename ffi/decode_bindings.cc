// DecodeEngine in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <tuple>

#include "ffi/bindings.h"
#include "ffi/decode_engine.h"

#ifdef NORTH_JAX_CUDA_ARCHITECTURES
#include "ffi/decode_cuda_platform.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace north_jax {
namespace {

using megakernel::Model;
using megakernel::TaskLists;
using megakernel::Type;

using Matrix = std::tuple<uintptr_t, int64_t, int64_t>;                       // address, rows, columns
using Place = std::tuple<int64_t, int64_t, int32_t, int32_t>;                 // offset, plane_bytes, planes, leading
using Logprobs = std::tuple<float, std::vector<std::tuple<int32_t, float>>>;  // of the token; of alternatives
// Quantum, step, slot, token, finish, log-probabilities where the row reports them.
using Entry = std::tuple<uint32_t, int32_t, int32_t, int32_t, int32_t, std::optional<Logprobs>>;
using Words = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Descriptors =
    nb::ndarray<const int32_t, nb::shape<-1, megakernel::kDescriptorFields>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& otherwise) {
    if (!holds) throw std::invalid_argument(otherwise);
}

void expect(const std::string& name, size_t found, size_t expected) {
    require(found == expected, std::to_string(found) + " " + name + ", expected " + std::to_string(expected));
}

std::unique_ptr<DecodePlatform> make_platform(const std::string& name, [[maybe_unused]] const Model& model) {
    if (name == "cpu") return make_cpu_platform();
#ifdef NORTH_JAX_CUDA_ARCHITECTURES
    if (name == "cuda") return make_cuda_platform(model);
#endif
    throw std::invalid_argument("no decode engine for platform " + name);
}

// The engine as a Python object. When that goes, the weights may go: the destructor waits for running calls.
class Handle {
   public:
    Handle(const std::string& platform, const std::string& dtype, megakernel::Geometry geometry,
           const std::vector<Matrix>& weights, std::vector<float> frequencies, nb::handle /* owner */) {
        require(dtype == "float32" || dtype == "bfloat16", "no decode engine for " + dtype);
        expect("weights", weights.size(), static_cast<size_t>(geometry.layers + 1) * megakernel::kWeightCount);
        expect("frequencies", frequencies.size(), static_cast<size_t>(geometry.head_dim) / 2);
        Model model;
        model.geometry = geometry;
        model.type = dtype == "float32" ? Type::kFloat32 : Type::kBFloat16;
        model.frequencies = std::move(frequencies);
        for (const auto& [address, rows, columns] : weights) {
            model.weights.push_back({reinterpret_cast<const void*>(address), rows, columns});
        }
        auto on_platform = make_platform(platform, model);
        engine_ = DecodeEngine::create(std::move(model), std::move(on_platform));
    }
    ~Handle() {
        if (engine_) engine_->close();
    }
    Handle(const Handle&) = delete;
    DecodeEngine* operator->() const { return engine_.get(); }

   private:
    std::shared_ptr<DecodeEngine> engine_;
};

int32_t add_schedule(Handle& engine, int32_t batch, Descriptors tasks, Words begin, Words counter_needs,
                     std::vector<std::string> counter_names, std::vector<std::string> queue_names,
                     const std::vector<Place>& buffers, int64_t workspace_bytes) {
    expect("buffers", buffers.size(), megakernel::kBufferCount);
    TaskLists lists;
    lists.batch = batch;
    lists.tasks.assign(tasks.data(), tasks.data() + tasks.size());
    lists.begin.assign(begin.data(), begin.data() + begin.size());
    lists.counter_needs.assign(counter_needs.data(), counter_needs.data() + counter_needs.size());
    lists.counter_names = std::move(counter_names);
    lists.queue_names = std::move(queue_names);
    for (size_t i = 0; i < buffers.size(); ++i) {
        const auto& [offset, plane_bytes, planes, leading] = buffers[i];
        lists.buffers[i] = {offset, plane_bytes, planes, leading};
    }
    lists.workspace_bytes = workspace_bytes;
    return engine->add_schedule(std::move(lists));
}

std::vector<Entry> take_entries(Handle& engine, uint32_t quantum, double timeout_s) {
    std::vector<Entry> entries;
    for (const auto& entry : engine->take_entries(quantum, timeout_s)) {
        std::optional<Logprobs> logprobs;
        if (entry.alternatives >= 0) {
            auto& [logprob, top] = logprobs.emplace();
            logprob = entry.logprob;
            for (int32_t i = 0; i < entry.alternatives && entry.top_token[i] >= 0; ++i) {
                top.emplace_back(entry.top_token[i], entry.top_logprob[i]);
            }
        }
        entries.emplace_back(entry.quantum, entry.step, entry.slot, entry.token, entry.finish, std::move(logprobs));
    }
    return entries;
}

}  // namespace

void bind_decode_engine(nb::module_& module) {
    using megakernel::Geometry;
    nb::class_<Geometry>(module, "Geometry")
        .def(nb::init<>())
        .def_rw("hidden", &Geometry::hidden)
        .def_rw("layers", &Geometry::layers)
        .def_rw("heads", &Geometry::heads)
        .def_rw("kv_heads", &Geometry::kv_heads)
        .def_rw("head_dim", &Geometry::head_dim)
        .def_rw("expert_width", &Geometry::expert_width)
        .def_rw("dense_width", &Geometry::dense_width)
        .def_rw("experts", &Geometry::experts)
        .def_rw("top_k", &Geometry::top_k)
        .def_rw("vocabulary", &Geometry::vocabulary)
        .def_rw("norm_eps", &Geometry::norm_eps)
        .def_rw("logit_scale", &Geometry::logit_scale)
        .def_rw("layer_norm", &Geometry::layer_norm)
        .def_rw("softmax_router", &Geometry::softmax_router)
        .def_rw("renormalise", &Geometry::renormalise);

    nb::class_<Handle>(module, "DecodeEngine")
        .def(nb::init<const std::string&, const std::string&, Geometry, const std::vector<Matrix>&, std::vector<float>,
                      nb::handle>(),
             nb::kw_only(), "platform"_a, "dtype"_a, "geometry"_a, "weights"_a, "frequencies"_a, "owner"_a,
             nb::keep_alive<1, 7>())  // owner, as long as the engine
        .def_prop_ro("id", [](Handle& engine) { return engine->id(); })
        .def("add_schedule", &add_schedule, nb::kw_only(), "batch"_a, "tasks"_a, "begin"_a, "counter_needs"_a,
             "counter_names"_a, "queue_names"_a, "buffers"_a, "workspace_bytes"_a)
        .def(
            "queue",
            [](Handle& engine, int32_t schedule, int32_t steps, int32_t threads, uint64_t seed, double timeout_s,
               uint32_t counter_origin) {
                return engine->queue(schedule, steps, {threads, seed, timeout_s, counter_origin});
            },
            "schedule"_a, "steps"_a, nb::kw_only(), "threads"_a = 1, "seed"_a = 0, "timeout_s"_a = 10.0,
            "counter_origin"_a = 0)
        .def("drop_queued", [](Handle& engine) { engine->drop_queued(); })
        .def("stop", [](Handle& engine) { engine->stop(); })
        .def(
            "cancel", [](Handle& engine, int32_t row, uint32_t quantum) { engine->cancel(row, quantum); }, "row"_a,
            "quantum"_a)
        .def("take_entries", &take_entries, "quantum"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("finished", [](Handle& engine) { return engine->finished(); })
        .def("error", [](Handle& engine, uint32_t quantum) { return engine->error(quantum); }, "quantum"_a);
}

}  // namespace north_jax
