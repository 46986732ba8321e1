// The counters that order the tasks of a quantum. Arrivals release and waits acquire, and nothing else of the executor
// orders one SM's tasks after another's: so ThreadSanitizer sees a wait that is missing from the lists.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace north_jax::megakernel {

class Counters {
   public:
    // needs: arrivals at each in one step. Counters are never reset, and compared by difference, so that they may wrap.
    Counters(const std::vector<int32_t>& needs, uint32_t origin)
        : needs_(needs), origin_(origin), values_(needs.size()) {
        for (auto& value : values_) value.store(origin, std::memory_order_relaxed);
    }

    int32_t size() const { return static_cast<int32_t>(needs_.size()); }

    // Arrivals of one step, all that there are.
    int32_t need(int32_t counter) const { return needs_[counter]; }

    // Arrivals of this step so far, without ordering anything.
    int32_t arrived(int32_t counter, int32_t step) const {
        return since(values_[counter].load(std::memory_order_relaxed), counter, step);
    }

    bool shows(int32_t counter, int32_t need, int32_t step) const {
        return since(values_[counter].load(std::memory_order_acquire), counter, step) >= need;
    }

    // False where there are more arrivals than a step has.
    bool arrive(int32_t counter, int64_t count, int32_t step) {
        const uint32_t before = values_[counter].fetch_add(static_cast<uint32_t>(count), std::memory_order_release);
        return since(before, counter, step) + count <= needs_[counter];
    }

   private:
    int32_t since(uint32_t value, int32_t counter, int32_t step) const {
        const uint32_t earlier = static_cast<uint32_t>(step) * static_cast<uint32_t>(needs_[counter]);
        return static_cast<int32_t>(value - origin_ - earlier);
    }

    const std::vector<int32_t>& needs_;
    const uint32_t origin_;
    std::vector<std::atomic<uint32_t>> values_;
};

}  // namespace north_jax::megakernel
