// A CUDA driver without a GPU: libcuda.so.1 as far as kvsm calls it, on host memory.
//
// It stands where the real one does, below cuda-bindings, so that the engine's own calls are what is tested.
// What it makes worse than a GPU would, because a GPU may:
//
//   - nothing runs when it is queued, not even an upload from pageable memory: the call comes back when it
//     has read its source, and the bytes follow on the default stream. A stream runs as far as an event needs
//     it, when that event is synchronised, or queried for the second time. A table or a source that is reused
//     early is read late;
//   - the sources of a batch that allows any order (CU_MEMCPY_SRC_ACCESS_ORDER_ANY) are read at the call, and
//     of one that asks for stream order when it runs;
//   - copies of one batch run last first.
//
// A test that chooses when the device works takes over with fake_stepped: then a query runs nothing, and a
// stream does one operation for each fake_step.
//
// It refuses what the driver refuses: calls without a current context, unknown handles, copies of no bytes,
// batches on the default stream, pitches below the width. A kernel that is given host memory which is not
// page-locked loses the device. The kernel is the real source, compiled as host C++.
//
// It does not model: time (an operation takes a microsecond, and a byte of a copy 20 ps), more than one
// device, pageable memory being copied while the call lasts, the copy engines' own order between streams.

#include "shim.h"
#include KERNEL_SOURCE

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace {

typedef unsigned long long Address;
typedef int Result;

enum : Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NO_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

struct Stream;

struct Operation {
    std::function<void()> work;
    Stream* after = nullptr;  // what it waits for: so many operations of this stream
    Address behind = 0;
};

struct Stream {
    std::deque<Operation> queue;
    Address queued = 0, ran = 0;  // operations so far
};

struct Event {
    unsigned int flags = 0;
    Stream* stream = nullptr;  // where it was recorded last
    Address behind = 0;        // operations of that stream that it stands behind
    Address time = 0;          // when it was reached, ns
    bool asked = false;
};

struct Copy {
    Address target, source;
    size_t size;
};

std::recursive_mutex lock;
std::string calls;
std::map<std::string, std::pair<int, Result>> failures;  // of the nth call from now on
std::map<Address, size_t> page_locked, device_memory;
std::set<Stream*> streams;
std::set<Event*> events;
Stream default_stream;
Result lost = SUCCESS;
int version = 13000;
int retained = 0;
bool stepped = false;
Address now = 0;
char the_context, the_module, the_kernel;
thread_local std::vector<void*> contexts;

bool inside(const std::map<Address, size_t>& ranges, Address address, size_t size)
{
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return false;
    auto range = std::prev(after);
    return address + size <= range->first + range->second;
}

// What is known of memory that was given back and is used again is forgotten.
void lock_pages(Address first, size_t size)
{
    auto range = page_locked.lower_bound(first);
    if (range != page_locked.begin() && std::prev(range)->first + std::prev(range)->second > first) --range;
    while (range != page_locked.end() && range->first < first + size) range = page_locked.erase(range);
    page_locked[first] = size;
}

void lose(Result code)
{
    lost = code;
    default_stream.queue.clear();
    for (Stream* stream : streams) stream->queue.clear();
}

void run(Stream* stream, Address until)
{
    while (!lost && stream->ran < until) {
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        now += 1000;
        if (operation.after) run(operation.after, operation.behind);
        if (operation.work) operation.work();
        ++stream->ran;
    }
}

void queue(Stream* stream, std::function<void()> work)
{
    stream->queue.push_back({std::move(work)});
    ++stream->queued;
}

void queue_wait(Stream* stream, Stream* after, Address behind)
{
    stream->queue.push_back({{}, after, behind});
    ++stream->queued;
}

// Note a call; what it is to answer instead of doing anything.
Result enter(bool needs_context, const char* name, const char* format = "", ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    calls += std::string(name) + (*text ? " " : "") + text + "\n";
    auto failure = failures.find(name);
    if (failure != failures.end() && --failure->second.first == 0) {
        Result code = failure->second.second;
        failures.erase(failure);
        return code;
    }
    if (lost) return lost;
    return needs_context && (contexts.empty() || !contexts.back()) ? NO_CONTEXT : SUCCESS;
}

Stream* stream_of(void* handle)
{
    if (!handle) return &default_stream;
    Stream* stream = static_cast<Stream*>(handle);
    return streams.count(stream) ? stream : nullptr;
}

void copy_all(const std::vector<Copy>& copies)
{
    for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy) {
        memcpy(reinterpret_cast<void*>(copy->target), reinterpret_cast<void*>(copy->source), copy->size);
        now += copy->size / 50;
    }
}

struct Pitched {
    struct Side {
        size_t x, y;
        int memory_type;
        void* host;
        Address device;
        void* array;
        size_t pitch;
    } source, target;
    size_t width, height;
};

struct Attributes {
    int order;
    int hints[4];
    unsigned int flags;
};

bool reachable(const Pair* pairs, unsigned long long num_pairs, const Part* parts,
               unsigned long long num_parts, unsigned char* host, unsigned long long stride, int, int)
{
    if (!inside(page_locked, reinterpret_cast<Address>(pairs), num_pairs * sizeof(Pair))) return false;
    if (!inside(device_memory, reinterpret_cast<Address>(parts), num_parts * sizeof(Part))) return false;
    for (unsigned long long pair = 0; pair < num_pairs; ++pair)
        for (unsigned long long part = 0; part < num_parts; ++part) {
            Address at = reinterpret_cast<Address>(host) + pairs[pair].host_block * stride;
            if (!inside(page_locked, at + parts[part].host_offset, parts[part].bytes)) return false;
        }
    return true;
}

// The parameters are read when the kernel is launched, what they point to when it runs.
template <typename... Types, size_t... places>
std::function<void()> launched(unsigned int blocks, unsigned int threads, void (*kernel)(Types...),
                               void** parameters, std::index_sequence<places...>)
{
    std::tuple<Types...> values(*static_cast<Types*>(parameters[places])...);
    return [=] {
        if (!reachable(std::get<places>(values)...)) return lose(ILLEGAL_ADDRESS);
        launch(blocks, threads, kernel, std::get<places>(values)...);
        if (misaligned) lose(716);
    };
}

template <typename... Types>
std::function<void()> launched(unsigned int blocks, unsigned int threads, void (*kernel)(Types...),
                               void** parameters)
{
    return launched(blocks, threads, kernel, parameters, std::index_sequence_for<Types...>());
}

}  // namespace

#define ENTER(needs_context, ...)                                         \
    std::lock_guard<std::recursive_mutex> guard(lock);                    \
    if (Result code = enter(needs_context, __func__, ##__VA_ARGS__)) return code

extern "C" {

Result cuInit(unsigned int)
{
    ENTER(false);
    return SUCCESS;
}

Result cuDriverGetVersion(int* answer)
{
    *answer = version;
    return SUCCESS;
}

Result cuGetErrorString(Result, const char** answer)
{
    *answer = "what the driver says of it";
    return SUCCESS;
}

Result cuDeviceGetCount(int* answer)
{
    *answer = 1;
    return SUCCESS;
}

Result cuDeviceGet(int* device, int ordinal)
{
    *device = ordinal;
    return ordinal ? INVALID_VALUE : SUCCESS;
}

Result cuDeviceGetName(char* name, int size, int)
{
    snprintf(name, size, "Fake GPU");
    return SUCCESS;
}

Result cuDeviceGetAttribute(int* answer, int attribute, int)
{
    *answer = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 2 : -1;
    return *answer < 0 ? INVALID_VALUE : SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void** context, int)
{
    ENTER(false);
    *context = &the_context;
    ++retained;
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease(int)
{
    ENTER(false);
    return retained-- > 0 ? SUCCESS : NO_CONTEXT;
}

Result cuCtxPushCurrent(void* context)
{
    contexts.push_back(context);
    return SUCCESS;
}

Result cuCtxPopCurrent(void** context)
{
    if (contexts.empty()) return NO_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

Result cuCtxSetCurrent(void* context)
{
    ENTER(false);
    if (contexts.empty()) contexts.push_back(context);
    contexts.back() = context;
    return SUCCESS;
}

Result cuThreadExchangeStreamCaptureMode(int* mode)
{
    ENTER(true, "%d", *mode);
    *mode = 0;
    return SUCCESS;
}

Result cuCtxGetCurrent(void** context)
{
    *context = contexts.empty() ? nullptr : contexts.back();
    return SUCCESS;
}

Result cuCtxGetStreamPriorityRange(int* least, int* greatest)
{
    ENTER(true);
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

Result cuStreamCreateWithPriority(void** stream, unsigned int flags, int priority)
{
    ENTER(true, "%u %d", flags, priority);
    *stream = *streams.insert(new Stream).first;
    return SUCCESS;
}

Result cuStreamSynchronize(void* handle)
{
    ENTER(true, "%p", handle);
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    run(stream, stream->queued);
    return lost;
}

Result cuStreamDestroy(void* handle)
{
    ENTER(true, "%p", handle);
    Stream* stream = static_cast<Stream*>(handle);
    if (!streams.count(stream)) return INVALID_HANDLE;
    run(stream, stream->queued);
    streams.erase(stream);  // not deleted, so that no later one has its handle
    return lost;
}

Result cuStreamWaitEvent(void* handle, void* event_handle, unsigned int)
{
    ENTER(true, "%p %p", handle, event_handle);
    Stream* stream = stream_of(handle);
    Event* event = static_cast<Event*>(event_handle);
    if (!stream || !events.count(event)) return INVALID_HANDLE;
    if (event->stream) queue_wait(stream, event->stream, event->behind);
    return SUCCESS;
}

Result cuEventCreate(void** event, unsigned int flags)
{
    ENTER(true, "%u", flags);
    Event* made = *events.insert(new Event).first;
    made->flags = flags;
    *event = made;
    return SUCCESS;
}

Result cuEventRecord(void* event_handle, void* handle)
{
    ENTER(true, "%p %p", event_handle, handle);
    Stream* stream = stream_of(handle);
    Event* event = static_cast<Event*>(event_handle);
    if (!stream || !events.count(event)) return INVALID_HANDLE;
    queue(stream, [=] { event->time = now; });
    event->stream = stream;
    event->behind = stream->queued;
    event->asked = false;
    return SUCCESS;
}

Result cuEventQuery(void* handle)
{
    ENTER(true, "%p", handle);
    Event* event = static_cast<Event*>(handle);
    if (!events.count(event)) return INVALID_HANDLE;
    if (!event->stream || event->stream->ran >= event->behind) return SUCCESS;
    if (stepped || !event->asked) {
        event->asked = true;
        return NOT_READY;
    }
    run(event->stream, event->behind);
    return lost;
}

Result cuEventSynchronize(void* handle)
{
    ENTER(true, "%p", handle);
    Event* event = static_cast<Event*>(handle);
    if (!events.count(event)) return INVALID_HANDLE;
    if (event->stream) run(event->stream, event->behind);
    return lost;
}

Result cuEventElapsedTime(float* milliseconds, void* earlier, void* later)
{
    ENTER(true, "%p %p", earlier, later);
    Event *from = static_cast<Event*>(earlier), *to = static_cast<Event*>(later);
    if (!events.count(from) || !events.count(to) || !from->stream || !to->stream) return INVALID_HANDLE;
    if ((from->flags | to->flags) & 2) return INVALID_HANDLE;  // made without timing
    for (Event* event : {from, to})
        if (event->stream->ran < event->behind) return NOT_READY;
    *milliseconds = (to->time - from->time) / 1e6f;
    return SUCCESS;
}

Result cuEventDestroy(void* handle)
{
    ENTER(true, "%p", handle);
    return events.erase(static_cast<Event*>(handle)) ? SUCCESS : INVALID_HANDLE;
}

Result cuMemHostRegister(void* address, size_t size, unsigned int)
{
    ENTER(true, "%p %zu", address, size);
    Address first = reinterpret_cast<Address>(address);
    if (!first || !size) return INVALID_VALUE;
    if (inside(page_locked, first, 1)) return ALREADY_REGISTERED;
    page_locked[first] = size;
    return SUCCESS;
}

Result cuMemHostUnregister(void* address)
{
    ENTER(true, "%p", address);
    return page_locked.erase(reinterpret_cast<Address>(address)) ? SUCCESS : NOT_REGISTERED;
}

Result cuPointerGetAttribute(void* answer, int attribute, Address address)
{
    ENTER(true, "%d %llx", attribute, address);
    *static_cast<Address*>(answer) = address;
    return attribute == 3 && inside(page_locked, address, 1) ? SUCCESS : INVALID_VALUE;
}

Result cuMemHostAlloc(void** address, size_t size, unsigned int)
{
    ENTER(true, "%zu", size);
    *address = new unsigned char[size];
    lock_pages(reinterpret_cast<Address>(*address), size);
    return SUCCESS;
}

Result cuMemFreeHost(void* address)
{
    ENTER(true, "%p", address);
    if (!page_locked.erase(reinterpret_cast<Address>(address))) return INVALID_VALUE;
    delete[] static_cast<unsigned char*>(address);
    return SUCCESS;
}

Result cuMemAlloc(Address* address, size_t size)
{
    ENTER(true, "%zu", size);
    if (!size) return INVALID_VALUE;
    *address = reinterpret_cast<Address>(new unsigned char[size]);
    device_memory[*address] = size;
    return SUCCESS;
}

Result cuMemFree(Address address)
{
    ENTER(true, "%llx", address);
    if (!device_memory.erase(address)) return INVALID_VALUE;
    delete[] reinterpret_cast<unsigned char*>(address);
    return SUCCESS;
}

Result cuMemcpyHtoD(Address target, const void* source, size_t size)
{
    ENTER(true, "%zu", size);
    std::string staged(static_cast<const char*>(source), size);
    queue(&default_stream, [=] { memcpy(reinterpret_cast<void*>(target), staged.data(), size); });
    return SUCCESS;
}

Result cuMemcpyAsync(Address target, Address source, size_t size, void* handle)
{
    ENTER(true, "%p %zu", handle, size);
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!target || !source || !size) return INVALID_VALUE;
    queue(stream, [=] { copy_all({{target, source, size}}); });
    return SUCCESS;
}

Result cuMemcpy2DAsync(const Pitched* pitched, void* handle)
{
    ENTER(true, "%p %zu %zu", handle, pitched->width, pitched->height);
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!pitched->width || !pitched->height) return INVALID_VALUE;
    for (const Pitched::Side& side : {pitched->source, pitched->target}) {
        if (side.memory_type != 4 || !side.device || side.x || side.y) return INVALID_VALUE;
        if (side.pitch < pitched->width || side.pitch > 2147483647) return INVALID_VALUE;
    }
    std::vector<Copy> rows;
    for (size_t row = 0; row < pitched->height; ++row)
        rows.push_back({pitched->target.device + row * pitched->target.pitch,
                        pitched->source.device + row * pitched->source.pitch, pitched->width});
    queue(stream, [=] { copy_all(rows); });
    return SUCCESS;
}

Result cuMemcpyBatchAsync(Address* targets, Address* sources, size_t* sizes, size_t count,
                          Attributes* attributes, size_t* places, size_t num_attributes, size_t* failed,
                          void* handle)
{
    ENTER(true, "%p %zu order %d", handle, count, attributes ? attributes->order : -1);
    Stream* stream = stream_of(handle);
    if (!stream || stream == &default_stream) return INVALID_HANDLE;
    *failed = static_cast<size_t>(-1);
    if (!count || num_attributes != 1 || places[0] != 0) return INVALID_VALUE;
    if (attributes->order != 1 && attributes->order != 3) return INVALID_VALUE;
    std::vector<Copy> copies;
    for (size_t place = 0; place < count; ++place) {
        *failed = place;
        if (!targets[place] || !sources[place] || !sizes[place]) return INVALID_VALUE;
        copies.push_back({targets[place], sources[place], sizes[place]});
    }
    if (attributes->order == 1) {
        queue(stream, [=] { copy_all(copies); });
        return SUCCESS;
    }
    std::vector<std::string> early;
    for (const Copy& copy : copies)
        early.emplace_back(reinterpret_cast<const char*>(copy.source), copy.size);
    queue(stream, [=] {
        std::vector<Copy> late = copies;
        for (size_t place = 0; place < late.size(); ++place)
            late[place].source = reinterpret_cast<Address>(early[place].data());
        copy_all(late);
    });
    return SUCCESS;
}

Result cuModuleLoadData(void** module, const void* image)
{
    ENTER(true);
    *module = &the_module;
    return memcmp(image, "\x7f" "ELF", 4) && memcmp(image, "//", 2) ? INVALID_VALUE : SUCCESS;
}

Result cuModuleUnload(void* module)
{
    ENTER(true);
    return module == &the_module ? SUCCESS : INVALID_HANDLE;
}

Result cuModuleGetFunction(void** kernel, void* module, const char* name)
{
    ENTER(true, "%s", name);
    *kernel = &the_kernel;
    return module == &the_module && !strcmp(name, "kvsm_copy") ? SUCCESS : NOT_FOUND;
}

Result cuLaunchKernel(void* kernel, unsigned int blocks, unsigned int, unsigned int, unsigned int threads,
                      unsigned int, unsigned int, unsigned int, void* handle, void** parameters, void**)
{
    ENTER(true, "%p %u %u table %p", handle, blocks, threads, *static_cast<void**>(parameters[0]));
    Stream* stream = stream_of(handle);
    if (!stream || kernel != &the_kernel) return INVALID_HANDLE;
    if (!blocks || !threads || threads > 1024) return INVALID_VALUE;
    queue(stream, launched(blocks, threads, kvsm_copy, parameters));
    return SUCCESS;
}

// NVRTC asks the driver for tables of its own, and does without.
Result cuGetExportTable(const void** table, const void*)
{
    *table = nullptr;
    return NOT_FOUND;
}

Result cuGetProcAddress_v2(const char* name, void** function, int asked, unsigned long long, int* status)
{
#define KNOWN(function) {#function, reinterpret_cast<void*>(function)}
    static const std::map<std::string, void*> known = {
        KNOWN(cuInit), KNOWN(cuDriverGetVersion), KNOWN(cuGetErrorString), KNOWN(cuDeviceGetCount),
        KNOWN(cuDeviceGet), KNOWN(cuDeviceGetName), KNOWN(cuDeviceGetAttribute),
        KNOWN(cuDevicePrimaryCtxRetain), KNOWN(cuDevicePrimaryCtxRelease), KNOWN(cuCtxPushCurrent),
        KNOWN(cuCtxPopCurrent), KNOWN(cuCtxSetCurrent), KNOWN(cuCtxGetCurrent),
        KNOWN(cuThreadExchangeStreamCaptureMode), KNOWN(cuCtxGetStreamPriorityRange),
        KNOWN(cuStreamCreateWithPriority), KNOWN(cuStreamSynchronize),
        KNOWN(cuStreamDestroy), KNOWN(cuStreamWaitEvent), KNOWN(cuEventCreate), KNOWN(cuEventRecord),
        KNOWN(cuEventQuery), KNOWN(cuEventSynchronize), KNOWN(cuEventElapsedTime), KNOWN(cuEventDestroy),
        KNOWN(cuMemHostRegister), KNOWN(cuMemHostUnregister), KNOWN(cuPointerGetAttribute),
        KNOWN(cuMemHostAlloc), KNOWN(cuMemFreeHost), KNOWN(cuMemAlloc), KNOWN(cuMemFree),
        KNOWN(cuMemcpyHtoD), KNOWN(cuMemcpyAsync), KNOWN(cuMemcpy2DAsync),
        KNOWN(cuMemcpyBatchAsync), KNOWN(cuModuleLoadData), KNOWN(cuModuleUnload),
        KNOWN(cuModuleGetFunction), KNOWN(cuLaunchKernel),
        {"cuGetProcAddress", reinterpret_cast<void*>(cuGetProcAddress_v2)},
    };
#undef KNOWN
    auto found = known.find(name);
    *function = found == known.end() ? nullptr : found->second;
    // The form without failIdx, that CUDA 13.0 brought, is another function; nobody asks for it in earnest.
    if (!strcmp(name, "cuMemcpyBatchAsync") && (version < 12080 || asked != 12080)) *function = nullptr;
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

// What tests ask and order.

void fake_reset()
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    calls.clear();
    failures.clear();
    default_stream.queue.clear();
    default_stream.ran = default_stream.queued;
    lost = SUCCESS;
    stepped = false;
    version = 13000;
    misaligned = 0;
}

const char* fake_calls()
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    static std::string copy;
    copy = calls;
    return copy.c_str();
}

void fake_fail(const char* name, int nth, Result code)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    failures[name] = {nth, code};
}

void fake_lose(Result code)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    lose(code);
}

// What a model's kernels do, on any stream and from any thread.
Result fake_fill(Address target, size_t size, int value, void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    queue(stream, [=] { memset(reinterpret_cast<void*>(target), value, size); });
    return SUCCESS;
}

Result fake_read(Address target, Address source, size_t size, void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    queue(stream, [=] { copy_all({{target, source, size}}); });
    return SUCCESS;
}

void fake_run(void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Stream* stream = stream_of(handle)) run(stream, stream->queued);
}

void fake_stepped()
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    stepped = true;
}

// Whether a stream can do its next operation: one is queued, and what it waits for is done.
int fake_can_step(void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = stream_of(handle);
    if (lost || !stream || stream->queue.empty()) return 0;
    const Operation& next = stream->queue.front();
    return !next.after || next.after->ran >= next.behind;
}

void fake_step(void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Stream* stream = stream_of(handle)) run(stream, stream->ran + !stream->queue.empty());
}

// How many operations of a stream are queued, and were not done.
int fake_left(void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = stream_of(handle);
    return stream && !lost ? static_cast<int>(stream->queue.size()) : 0;
}

// Whether nobody need wait for an event any more.
int fake_reached(void* handle)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* event = static_cast<Event*>(handle);
    return lost || !events.count(event) || !event->stream || event->stream->ran >= event->behind;
}

void fake_version(int asked)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    version = asked;
}

void fake_page_lock(Address address, size_t size)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    lock_pages(address, size);
}

void fake_unlock_all()
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    page_locked.clear();
}

int fake_retained()
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    return retained;
}

}
