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

bool batch_of(Batch *batch, PyObject *ids)
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
        array = PyObject_CallFunctionObjArgs(python.unpack, ids, NULL);
        if (array == NULL) {
            PyErr_Clear();
            return false;
        }
    } else
        Py_INCREF(ids);
    if (PyObject_GetBuffer(array, &batch->buffer, PyBUF_CONTIG_RO) < 0) {
        PyErr_Clear();
        batch->buffer.obj = NULL;
        Py_DECREF(array);
        return false;
    }
    batch->object = array;
    batch->ids = batch->buffer.buf;
    batch->count = batch->buffer.len / (Py_ssize_t)sizeof(int64_t);
    if (batch->buffer.itemsize != sizeof(int64_t)) {
        batch_clear(batch);
        return false;
    }
    return true;
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
