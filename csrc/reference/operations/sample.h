// Sampling, as north_jax/sampling.py does it: SAMPLE_CUTOFF, SAMPLE_MASS, SAMPLE_DRAW.
//
// Weights are relative to the likeliest token's. The tokens that top-k, top-p and min-p keep are the first ones by
// descending weight and then ascending id: the last of them describes them all.
#pragma once

#include <cstdint>

#include "csrc/reference/context.h"

namespace north_jax::megakernel {

void sample_cutoff(Context& context, const Task& task);
void sample_mass(Context& context, const Task& task);

}  // namespace north_jax::megakernel
