// The random numbers of a draw: those of jax.random with its default, partitionable threefry2x32.
#pragma once

#include <cstdint>
#include <cstring>

#include "csrc/host_device.h"

namespace north_jax::megakernel {

struct Words {
    uint32_t high;
    uint32_t low;
};

// 20 rounds of Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
HOST_DEVICE inline Words threefry2x32(Words key, Words counter) {
    const uint32_t keys[3] = {key.high, key.low, key.high ^ key.low ^ 0x1BD11BDAu};
    const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    uint32_t x = counter.high + keys[0], y = counter.low + keys[1];
    for (uint32_t group = 0; group < 5; ++group) {
        for (int round = 0; round < 4; ++round) {
            const int by = rotations[group % 2][round];
            x += y;
            y = (y << by | y >> (32 - by)) ^ x;
        }
        x += keys[(group + 1) % 3];
        y += keys[(group + 2) % 3] + group + 1;
    }
    return {x, y};
}

// jax.random.uniform(jax.random.fold_in(key, position), (n,))[index], for any n beyond index.
HOST_DEVICE inline float uniform(Words key, uint32_t position, uint32_t index) {
    const Words folded = threefry2x32(key, {0, position});
    const Words bits = threefry2x32(folded, {0, index});
    const uint32_t mantissa = (bits.high ^ bits.low) >> 9 | 0x3F800000u;
    float result;  // in [1, 2)
    memcpy(&result, &mantissa, sizeof(result));
    return result - 1.0f;
}

}  // namespace north_jax::megakernel
