// Copies pairs of blocks between device memory and page-locked host memory, in either direction.
//
// A pair is a device block and a host block. Every block has the same parts; a part is contiguous on both
// sides and at most a few KiB. Part p of pair i is unit i * num_parts + p. Each warp copies one unit after
// another. Nearly all of its time is latency: a read across PCIe takes one to two microseconds, and the pair
// must be read before its bytes. So before its first write, a thread issues all reads of a unit and the read
// of the next unit's pair. The launch has enough warps to hide the rest of the latency.
//
// Every byte is used only once. So the loads and stores (`__ldcs`, `__stcs`) are streaming, and do not evict
// the data of compute from the caches.
//
// There is no shared memory, no barrier and no warp intrinsic: the threads may run in any order, so the tests
// can run this source on the host.

// Aligned, so that one read fetches a pair, and two reads fetch a part.
struct alignas(16) Part {
    unsigned long long address;      // in device block 0
    unsigned long long stride;       // from a device block to the next
    unsigned long long host_offset;  // in a host block
    unsigned long long bytes;
};

struct alignas(8) Pair {
    unsigned int device_block;
    unsigned int host_block;
};

const int LANES = 32;     // threads that copy a unit together
const int IN_FLIGHT = 8;  // reads of one thread at a time

template <typename Vector>
__device__ __forceinline__ void copy_unit(
    const unsigned char* source, unsigned char* target, unsigned int bytes, unsigned int lane)
{
    const Vector* from = reinterpret_cast<const Vector*>(source) + lane;
    Vector* to = reinterpret_cast<Vector*>(target) + lane;
    int left = static_cast<int>(bytes / sizeof(Vector)) - static_cast<int>(lane);
#pragma unroll 1
    for (; left > 0; left -= LANES * IN_FLIGHT, from += LANES * IN_FLIGHT, to += LANES * IN_FLIGHT) {
        // Zeroed: otherwise the compiler keeps the values across iterations, and spills registers.
        Vector held[IN_FLIGHT] = {};
#pragma unroll
        for (int step = 0; step < IN_FLIGHT; ++step)
            if (step * LANES < left) held[step] = __ldcs(from + step * LANES);
#pragma unroll
        for (int step = 0; step < IN_FLIGHT; ++step)
            if (step * LANES < left) __stcs(to + step * LANES, held[step]);
    }
}

// vector_bytes is 16, 8, 4 or 1, and divides every address, stride, offset and size. With these launch bounds
// a thread has at most 64 registers, so that the largest thread block fits on a multiprocessor.
extern "C" __global__ void __launch_bounds__(1024, 1) kvsm_copy(
    const Pair* pairs,             // page-locked host memory, read when this runs
    unsigned long long num_pairs,
    const Part* parts,             // device memory
    unsigned long long num_parts,
    unsigned char* host,
    unsigned long long host_stride,
    int to_host,
    int vector_bytes)
{
    const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned int warps = gridDim.x * blockDim.x / LANES;
    const unsigned int lane = thread % LANES;
    const unsigned long long units = num_pairs * num_parts;
    unsigned long long unit = thread / LANES;
    if (unit >= units) return;
    Pair next = pairs[unit / num_parts];
    for (; unit < units; unit += warps) {
        // Read the next pair during the copy of this unit; otherwise each unit waits for the bus twice. The
        // compiler cannot do this itself, because the copy might change the pairs.
        const Pair pair = next;
        if (unit + warps < units) next = pairs[(unit + warps) / num_parts];
        const Part part = parts[unit % num_parts];
        unsigned char* on_device =
            reinterpret_cast<unsigned char*>(part.address + pair.device_block * part.stride);
        unsigned char* on_host = host + pair.host_block * host_stride + part.host_offset;
        const unsigned char* source = to_host ? on_device : on_host;
        unsigned char* target = to_host ? on_host : on_device;
        if (vector_bytes == 16) copy_unit<uint4>(source, target, part.bytes, lane);
        else if (vector_bytes == 8) copy_unit<uint2>(source, target, part.bytes, lane);
        else if (vector_bytes == 4) copy_unit<unsigned int>(source, target, part.bytes, lane);
        else copy_unit<unsigned char>(source, target, part.bytes, lane);
    }
}
