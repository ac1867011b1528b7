/* How keys enter the index, and how they leave it (kvsm/ledger/index.py). */

#include "body.h"

Verdict enter(Folding *folding, PyObject *keys, const Batch *slots)
{
    PyObject *index = field(folding, N_index), *key_of = field(folding, N_key_of);
    const Py_ssize_t count = slots->count, size = PyDict_Size(index) + count;
    for (Py_ssize_t one = 0; one < count; one++) {
        PyObject *key = PyTuple_GetItem(keys, one);
        if (!PyBytes_CheckExact(key) || PyDict_GetItemWithError(index, key) != NULL) {
            PyErr_Clear();
            return REFERENCE;
        }
    }
    for (Py_ssize_t one = 0; one < count; one++) {
        PyObject *slot = PyLong_FromLongLong(slots->ids[one]);
        if (slot == NULL || PyDict_SetItem(index, PyTuple_GetItem(keys, one), slot) < 0)
            return FAILED;
        Py_DECREF(slot);
    }
    if (PyDict_Size(index) != size) { /* a key is twice among them */
        for (Py_ssize_t one = 0; one < count; one++)
            if (PyDict_DelItem(index, PyTuple_GetItem(keys, one)) < 0)
                PyErr_Clear();
        return REFERENCE;
    }
    for (Py_ssize_t one = 0; one < count; one++) {
        PyObject *key = PyTuple_GetItem(keys, one);
        Py_INCREF(key);
        if (PyList_SetItem(key_of, (Py_ssize_t)slots->ids[one], key) < 0)
            return FAILED;
    }
    return FOLDED;
}

PyObject *remove_keys(Folding *folding, const Batch *slots)
{
    PyObject *index = field(folding, N_index), *key_of = field(folding, N_key_of);
    PyObject *keys = PyTuple_New(slots->count);
    if (keys == NULL)
        return NULL;
    for (Py_ssize_t one = 0; one < slots->count; one++) {
        PyObject *key = PyList_GetItem(key_of, (Py_ssize_t)slots->ids[one]);
        if (key == NULL || PyDict_DelItem(index, key) < 0) {
            Py_DECREF(keys);
            return NULL;
        }
        Py_INCREF(key);
        PyTuple_SetItem(keys, one, key);
    }
    if (!set_field(folding, N_forgotten_at, folding->seq_object))
        Py_CLEAR(keys);
    return keys;
}
