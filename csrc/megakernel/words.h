// The words that SMs synchronise through, and where they lie in device memory.
//
// Who polls a counter shares its sector of the L2 with nobody but those who arrive there. Each word that all SMs poll
// or add to has a line.
#pragma once

#include <cstdint>

#include "csrc/host_device.h"

namespace north_jax::megakernel {

inline constexpr int32_t kCounterStride = 32 / sizeof(uint32_t);  // words from one counter to the next: a sector
inline constexpr int32_t kLineWords = 128 / sizeof(uint32_t);

struct DeviceWords {
    uint32_t* counters;  // [counters · kCounterStride], see counter_at
    uint32_t* claims;    // [queues]
    uint32_t* decision;  // [1]: 2 · steps ended, and 1 more once the quantum has ended
    uint32_t* abort;     // [1]: not 0 once a wait has timed out anywhere
    uint32_t* exited;    // [1]: blocks that are done
};

template <class Word>
HOST_DEVICE Word* counter_at(Word* counters, int number) {
    return counters + int64_t{number} * kCounterStride;
}

// All words of a schedule in one piece of memory, aligned to a line.
struct WordLayout {
    int64_t counters;
    int64_t queues;

    // Those of the counters, which come first.
    int64_t counter_words() const { return whole_lines(counters * kCounterStride); }
    int64_t words() const { return counter_words() + whole_lines(queues) + 3 * kLineWords; }

    DeviceWords in(uint32_t* memory) const {
        uint32_t* claims = memory + counter_words();
        uint32_t* decision = claims + whole_lines(queues);
        return {memory, claims, decision, decision + kLineWords, decision + 2 * kLineWords};
    }

   private:
    static int64_t whole_lines(int64_t words) { return (words + kLineWords - 1) / kLineWords * kLineWords; }
};

}  // namespace north_jax::megakernel
