/* Batches of ids (kvsm/ids.py). */

#include "body.h"

bool read_number(PyObject *number, int64_t *value)
{
    if (number == NULL || !PyLong_CheckExact(number))
        return false;
    *value = PyLong_AsLongLong(number);
    if (*value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return *value >= 0;
}

static int64_t number_at(const uint8_t *bytes, int width)
{
    int64_t number = 0;
    for (int one = 0; one < width; one++)
        number |= (int64_t)bytes[one] << (8 * one);
    return number;
}

static uint8_t *put_number(uint8_t *bytes, int64_t number, int width)
{
    for (int one = 0; one < width; one++)
        bytes[one] = (uint8_t)(number >> (8 * one));
    return bytes + width;
}

static int64_t size_of_run(const uint8_t *bytes, int width)
{
    const int64_t first = number_at(bytes, width), last = number_at(bytes + width, width);
    return (last < first ? first - last : last - first) + 1;
}

PyObject *unpacked(PyObject *packed)
{
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(packed);
    const Py_ssize_t length = PyBytes_Size(packed) - 1;
    const int form = length < 0 ? 0 : bytes[0];
    const bool are_runs = form > RUNS;
    const int width = are_runs ? form - RUNS : form, size = are_runs ? 2 * width : width;
    if (width < 2 || width > 4 || length % size != 0)
        return NULL;
    const uint8_t *end = ++bytes + length;
    int64_t total = are_runs ? 0 : length / width;
    for (const uint8_t *run = bytes; are_runs && run < end && total <= MOST_IN_RUNS; run += size)
        total += size_of_run(run, width);
    if (are_runs && total > MOST_IN_RUNS)
        return NULL;
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total * (Py_ssize_t)sizeof(int64_t));
    if (numbers == NULL)
        return NULL;
    int64_t *ids = (int64_t *)PyBytes_AsString(numbers);
    for (; bytes < end; bytes += size) {
        const int64_t first = number_at(bytes, width);
        const int64_t last = are_runs ? number_at(bytes + width, width) : first;
        const int64_t step = last < first ? -1 : 1;
        for (int64_t id = first; id != last; id += step)
            *ids++ = id;
        *ids++ = last;
    }
    return numbers;
}

PyObject *unpack_ids(PyObject *module, PyObject *packed)
{
    (void)module;
    PyObject *numbers = PyBytes_CheckExact(packed) ? unpacked(packed) : NULL;
    if (numbers == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return numbers;
}

/* Where the run ends that begins at `one`. A step of one way never goes on in the other. */
static Py_ssize_t end_of_run(const int64_t *ids, Py_ssize_t one, Py_ssize_t count)
{
    const int64_t step = one + 1 < count ? ids[one + 1] - ids[one] : 0;
    const int64_t before = one > 0 ? ids[one] - ids[one - 1] : 0;
    if ((step != 1 && step != -1) || step == -before)
        return one;
    while (one + 1 < count && ids[one + 1] - ids[one] == step)
        one++;
    return one;
}

PyObject *packed_ids(const int64_t *ids, Py_ssize_t count)
{
    int64_t largest = 0;
    Py_ssize_t runs = 0;
    for (Py_ssize_t one = 0; one < count; one++) {
        if (ids[one] < 0 || ids[one] > UINT32_MAX)
            Py_RETURN_NONE;
        largest = ids[one] > largest ? ids[one] : largest;
    }
    for (Py_ssize_t one = 0; one < count; one = end_of_run(ids, one, count) + 1)
        runs++;
    const int width = largest < 1 << 16 ? 2 : largest < 1 << 24 ? 3 : 4;
    const bool are_runs = count <= MOST_IN_RUNS && 2 * runs < count;
    PyObject *made = PyBytes_FromStringAndSize(NULL, 1 + width * (are_runs ? 2 * runs : count));
    if (made == NULL)
        return NULL;
    uint8_t *bytes = (uint8_t *)PyBytes_AsString(made);
    *bytes++ = (uint8_t)(are_runs ? width + RUNS : width);
    for (Py_ssize_t one = 0; one < count; one++) {
        bytes = put_number(bytes, ids[one], width);
        if (are_runs) {
            one = end_of_run(ids, one, count);
            bytes = put_number(bytes, ids[one], width);
        }
    }
    return made;
}

/* The numbers of a list or a tuple; None if one of them is no id. */
static PyObject *packed_items(PyObject *ids)
{
    const bool is_list = PyList_CheckExact(ids);
    const Py_ssize_t count = is_list ? PyList_Size(ids) : PyTuple_Size(ids);
    int64_t *numbers = malloc((size_t)(count + 1) * sizeof *numbers);
    if (numbers == NULL)
        return PyErr_NoMemory();
    bool readable = true;
    for (Py_ssize_t one = 0; readable && one < count; one++)
        readable = read_number(is_list ? PyList_GetItem(ids, one) : PyTuple_GetItem(ids, one), &numbers[one]);
    PyObject *made = readable ? packed_ids(numbers, count) : Py_None;
    if (!readable)
        Py_INCREF(made);
    free(numbers);
    return made;
}

bool is_aligned(const Py_buffer *buffer)
{
    uintptr_t places = (uintptr_t)buffer->buf;
    for (int dimension = 0; buffer->strides != NULL && dimension < buffer->ndim; dimension++)
        places |= (uintptr_t)buffer->strides[dimension];
    return buffer->itemsize > 0 && places % (uintptr_t)buffer->itemsize == 0;
}

bool is_int64(const Py_buffer *buffer)
{
    return buffer->itemsize == sizeof(int64_t) && is_aligned(buffer) && buffer->format != NULL &&
           (strcmp(buffer->format, "l") == 0 || strcmp(buffer->format, "q") == 0);
}

PyObject *pack_ids(PyObject *module, PyObject *ids)
{
    (void)module;
    if (PyList_CheckExact(ids) || PyTuple_CheckExact(ids))
        return packed_items(ids);
    Py_buffer buffer;
    if (PyObject_GetBuffer(ids, &buffer, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *made = Py_None;
    if (is_int64(&buffer))
        made = packed_ids(buffer.buf, buffer.len / (Py_ssize_t)sizeof(int64_t));
    else
        Py_INCREF(made);
    PyBuffer_Release(&buffer);
    return made;
}

bool batch_read(Batch *batch, PyObject *ids)
{
    batch->object = NULL;
    batch->buffer.obj = NULL;
    batch->count = 0;
    if (ids == NULL)
        return false;
    if (PyTuple_CheckExact(ids)) {
        const Py_ssize_t count = PyTuple_Size(ids);
        if (count > SMALL)
            return false;
        for (Py_ssize_t one = 0; one < count; one++)
            if (!read_number(PyTuple_GetItem(ids, one), &batch->small[one]))
                return false;
        batch->count = count;
        batch->ids = batch->small;
        Py_INCREF(ids);
        batch->object = ids;
        return true;
    }
    PyObject *array = ids;
    if (PyBytes_CheckExact(ids)) {
        PyObject *numbers = unpacked(ids);
        const bool many = numbers != NULL && PyBytes_Size(numbers) > SMALL * (Py_ssize_t)sizeof(int64_t);
        array = many ? PyObject_CallFunctionObjArgs(python.array_of, numbers, NULL) : NULL;
        Py_XDECREF(numbers);
        if (array == NULL)
            return false;
    } else
        Py_INCREF(ids);
    if (PyObject_GetBuffer(array, &batch->buffer, PyBUF_CONTIG_RO) < 0) {
        batch->buffer.obj = NULL;
        Py_DECREF(array);
        return false;
    }
    batch->object = array;
    batch->ids = batch->buffer.buf;
    batch->count = batch->buffer.len / (Py_ssize_t)sizeof(int64_t);
    if (batch->buffer.itemsize != sizeof(int64_t) || !is_aligned(&batch->buffer)) {
        batch_clear(batch);
        return false;
    }
    return true;
}

bool batch_of(Batch *batch, PyObject *ids)
{
    const bool read = batch_read(batch, ids);
    if (!read)
        PyErr_Clear();
    return read;
}

PyObject *refuse_slots(void)
{
    const bool is_form = !PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_Exception);
    if (!is_form || PyErr_ExceptionMatches(PyExc_MemoryError))
        return NULL; /* no memory, or an interrupt */
    return PyErr_Format(PyExc_TypeError, "slots are a tuple, or an array of int64");
}

void batch_clear(Batch *batch)
{
    if (batch->buffer.obj != NULL)
        PyBuffer_Release(&batch->buffer);
    Py_CLEAR(batch->object);
}

PyObject *array_object(const int64_t *ids, Py_ssize_t count)
{
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)ids, count * (Py_ssize_t)sizeof *ids);
    PyObject *array = bytes == NULL ? NULL : PyObject_CallFunctionObjArgs(python.array_of, bytes, NULL);
    Py_XDECREF(bytes);
    return array;
}

PyObject *ids_object(const int64_t *ids, Py_ssize_t count)
{
    if (count > SMALL)
        return array_object(ids, count);
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t one = 0; tuple != NULL && one < count; one++) {
        PyObject *id = PyLong_FromLongLong(ids[one]);
        if (id == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SetItem(tuple, one, id);
    }
    return tuple;
}
