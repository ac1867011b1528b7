// CUDA C++ as host C++: enough of the language to run copy.cu, one thread after the other.
//
// Include this before the kernel's source, and start the kernel with `launch`. Memory is the host's. What a
// device refuses and a host does not, an address that its vector's size does not divide, is counted in
// `misaligned`.

#pragma once

#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    unsigned int x, y;
};

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

struct Dimensions {
    unsigned int x = 1, y = 1, z = 1;
};

static Dimensions threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
unsigned long long misaligned = 0;
}

template <typename Vector>
Vector __ldcs(const Vector* from)
{
    misaligned += reinterpret_cast<std::uintptr_t>(from) % sizeof(Vector) != 0;
    return *from;
}

template <typename Vector>
void __stcs(Vector* to, Vector value)
{
    misaligned += reinterpret_cast<std::uintptr_t>(to) % sizeof(Vector) != 0;
    *to = value;
}

template <typename Kernel, typename... Parameters>
void launch(unsigned int blocks, unsigned int threads, Kernel kernel, Parameters... parameters)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(parameters...);
}
