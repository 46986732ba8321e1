// HOST_DEVICE: marks functions that C++ and CUDA compile alike.
#pragma once

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
