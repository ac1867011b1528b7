/* Plans of copies (kvsm/copies/geometry.py): the runs of a transfer, its rectangles, and their rows.

   This file has no part in the fold. A layout is a table of int64, which `CopyPlanner` makes once. */

#include "body.h"

typedef struct {
    int64_t num_tensors, num_bands, is_dense, merges, host_stride;
} LayoutHead;

typedef struct {
    int64_t address, stride, row_bytes, host_address, band;
} Tensor;

typedef struct {
    int64_t first, height, pitch, host_pitch;
} Band;

typedef struct {
    const LayoutHead *head;
    const Tensor *tensors;
    const Band *bands;
} Layout;

/* Consecutive pairs of blocks; a single pair is a run of one. */
typedef struct {
    int64_t device, host, count;
} Run;

/* The columns to fill: of rectangles, or of their rows. on_device, on_host: columns of the addresses; those of the
   pitches are `PITCHES` further on. */
typedef struct {
    uint64_t *columns;
    Py_ssize_t count, filled;
    int on_device, on_host;
    bool are_rows;
} Plan;

enum { WIDTHS = 2, HEIGHTS = 3, PITCHES = 4, RECTANGLE_COLUMNS = 6, ROW_COLUMNS = 3 };

static bool read_layout(PyObject *table, Layout *layout)
{
    if (!PyBytes_CheckExact(table) || PyBytes_Size(table) < (Py_ssize_t)sizeof(LayoutHead))
        return false;
    layout->head = (const LayoutHead *)PyBytes_AsString(table);
    layout->tensors = (const Tensor *)(layout->head + 1);
    layout->bands = (const Band *)(layout->tensors + layout->head->num_tensors);
    const int64_t size = (int64_t)sizeof(LayoutHead) + layout->head->num_tensors * (int64_t)sizeof(Tensor) +
                         layout->head->num_bands * (int64_t)sizeof(Band);
    return PyBytes_Size(table) == size;
}

/* Radix sort by host block, a byte at a time; stable. spare: memory for `count` runs. Returns the sorted array, either
   `runs` or `spare`. */
static Run *sorted_runs(Run *runs, Run *spare, Py_ssize_t count)
{
    uint64_t largest = 0;
    bool ascends = true;
    for (Py_ssize_t one = 0; one < count; one++) {
        largest |= (uint64_t)runs[one].host;
        ascends = ascends && (one == 0 || runs[one - 1].host <= runs[one].host);
    }
    for (int shift = 0; !ascends && shift < 64 && largest >> shift != 0; shift += 8) {
        Py_ssize_t places[257] = {0};
        for (Py_ssize_t one = 0; one < count; one++)
            places[((uint64_t)runs[one].host >> shift & 255) + 1]++;
        for (int digit = 0; digit < 256; digit++)
            places[digit + 1] += places[digit];
        for (Py_ssize_t one = 0; one < count; one++)
            spare[places[(uint64_t)runs[one].host >> shift & 255]++] = runs[one];
        Run *other = runs;
        runs = spare;
        spare = other;
    }
    return runs;
}

/* Merge neighbours that are consecutive on both sides. Returns how many runs are left. */
static Py_ssize_t merged(Run *runs, Py_ssize_t count)
{
    Py_ssize_t last = 0;
    for (Py_ssize_t one = 1; one < count; one++) {
        Run *run = &runs[last];
        if (runs[one].device == run->device + run->count && runs[one].host == run->host + run->count)
            run->count++;
        else
            runs[++last] = runs[one];
    }
    return count == 0 ? 0 : last + 1;
}

static Py_ssize_t count_rectangles(const Layout *layout, const Run *runs, Py_ssize_t count)
{
    if (layout->head->is_dense)
        return count;
    Py_ssize_t total = 0;
    for (int64_t band = 0; band < layout->head->num_bands; band++)
        for (Py_ssize_t run = 0; run < count; run++) {
            const int64_t height = layout->bands[band].height;
            total += (Py_ssize_t)(runs[run].count < height ? runs[run].count : height);
        }
    return total;
}

/* A row is a fragment: a run of a dense layout, or a block of a tensor. */
static Py_ssize_t count_rows(const Layout *layout, const Run *runs, Py_ssize_t count)
{
    if (layout->head->is_dense)
        return count;
    Py_ssize_t blocks = 0;
    for (Py_ssize_t run = 0; run < count; run++)
        blocks += (Py_ssize_t)runs[run].count;
    return blocks * (Py_ssize_t)layout->head->num_tensors;
}

static void put_rectangle(Plan *plan, uint64_t device, uint64_t host, uint64_t width, int64_t height, uint64_t pitch,
                          uint64_t host_pitch)
{
    uint64_t *column = plan->columns + plan->filled++;
    column[plan->on_device * plan->count] = device;
    column[plan->on_host * plan->count] = host;
    column[WIDTHS * plan->count] = width;
    column[HEIGHTS * plan->count] = (uint64_t)height;
    column[(PITCHES + plan->on_device) * plan->count] = pitch;
    column[(PITCHES + plan->on_host) * plan->count] = host_pitch;
}

static void put(Plan *plan, const Tensor *tensor, int64_t host_stride, const Run *at, int64_t height, int64_t pitch,
                int64_t host_pitch)
{
    uint64_t width = (uint64_t)tensor->row_bytes;
    if (height == 1 || (pitch == tensor->row_bytes && host_pitch == tensor->row_bytes)) {
        width *= (uint64_t)height;
        height = 1;
        pitch = host_pitch = (int64_t)width;
    }
    const uint64_t device = (uint64_t)(tensor->address + at->device * tensor->stride);
    const uint64_t host = (uint64_t)(tensor->host_address + at->host * host_stride);
    if (!plan->are_rows) {
        put_rectangle(plan, device, host, width, height, (uint64_t)pitch, (uint64_t)host_pitch);
        return;
    }
    for (int64_t row = 0; row < height; row++) {
        uint64_t *column = plan->columns + plan->filled++;
        column[plan->on_device * plan->count] = device + (uint64_t)(row * pitch);
        column[plan->on_host * plan->count] = host + (uint64_t)(row * host_pitch);
        column[WIDTHS * plan->count] = width;
    }
}

static void fill(Plan *plan, const Layout *layout, const Run *runs, Py_ssize_t count)
{
    const int64_t host_stride = layout->head->host_stride;
    for (int64_t place = 0; place < layout->head->num_tensors; place++) {
        const Tensor *tensor = &layout->tensors[place];
        for (Py_ssize_t run = 0; run < count; run++)
            if (layout->head->is_dense || layout->bands[tensor->band].height <= runs[run].count)
                put(plan, tensor, host_stride, &runs[run], runs[run].count, tensor->stride, host_stride);
    }
    for (int64_t place = 0; !layout->head->is_dense && place < layout->head->num_bands; place++) {
        const Band *band = &layout->bands[place];
        for (Py_ssize_t run = 0; run < count; run++)
            for (int64_t step = 0; band->height > runs[run].count && step < runs[run].count; step++) {
                const Run at = {runs[run].device + step, runs[run].host + step, 1};
                put(plan, &layout->tensors[band->first], host_stride, &at, band->height, band->pitch, band->host_pitch);
            }
    }
}

/* Return the runs as bytes, a `Run` each, and the number of rectangles. */
static PyObject *runs_of(const Layout *layout, const Batch *device_blocks, const Batch *host_blocks)
{
    Py_ssize_t count = host_blocks->count;
    Run *room = malloc((size_t)(2 * count + 1) * sizeof *room), *runs = room;
    if (room == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t one = 0; one < count; one++)
        runs[one] = (Run){device_blocks->ids[one], host_blocks->ids[one], 1};
    if (layout->head->merges) {
        runs = sorted_runs(runs, room + count, count);
        count = merged(runs, count);
    }
    PyObject *made = PyBytes_FromStringAndSize((const char *)runs, count * (Py_ssize_t)sizeof *runs);
    if (made != NULL)
        made = Py_BuildValue("Nn", made, count_rectangles(layout, runs, count));
    free(room);
    return made;
}

/* Returns None if Python must merge, because the ids have another form, or must refuse. */
PyObject *plan_runs(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *table, *device_ids, *host_ids, *made = Py_None;
    Layout layout;
    Batch device_blocks, host_blocks;
    if (!PyArg_ParseTuple(arguments, "OOO:plan_runs", &table, &device_ids, &host_ids))
        return NULL;
    if (!read_layout(table, &layout) || !batch_of(&device_blocks, device_ids))
        Py_RETURN_NONE;
    const bool read = batch_of(&host_blocks, host_ids);
    if (read && device_blocks.count == host_blocks.count)
        made = runs_of(&layout, &device_blocks, &host_blocks);
    else
        Py_INCREF(made);
    if (read)
        batch_clear(&host_blocks);
    batch_clear(&device_blocks);
    return made;
}

static PyObject *columns_of(PyObject *arguments, bool are_rows)
{
    PyObject *table, *packed;
    int to_host;
    Py_ssize_t total;
    Layout layout;
    if (!PyArg_ParseTuple(arguments, "OpSn", &table, &to_host, &packed, &total))
        return NULL;
    const Run *runs = (const Run *)PyBytes_AsString(packed);
    const Py_ssize_t count = PyBytes_Size(packed) / (Py_ssize_t)sizeof *runs;
    const int num_columns = are_rows ? ROW_COLUMNS : RECTANGLE_COLUMNS;
    if (!read_layout(table, &layout) || total != (are_rows ? count_rows : count_rectangles)(&layout, runs, count))
        return PyErr_Format(PyExc_ValueError, "the runs of a copy come from plan_runs");
    PyObject *made = PyBytes_FromStringAndSize(NULL, total * num_columns * (Py_ssize_t)sizeof(uint64_t));
    if (made == NULL)
        return NULL;
    Plan plan = {.count = total, .on_device = !to_host, .on_host = to_host, .are_rows = are_rows};
    plan.columns = (uint64_t *)PyBytes_AsString(made);
    fill(&plan, &layout, runs, count);
    return made;
}

PyObject *plan_rectangles(PyObject *module, PyObject *arguments)
{
    (void)module;
    return columns_of(arguments, false);
}

PyObject *plan_fragments(PyObject *module, PyObject *arguments)
{
    (void)module;
    return columns_of(arguments, true);
}
