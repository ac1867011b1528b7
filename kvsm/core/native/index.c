/* Adds keys to the index and removes them (kvsm/core/ledger/index.py). */

#include "body.h"

KeyIndex *index_of(Folding *folding)
{
    PyObject *index = field(folding, N_index);
    return index != NULL && PyObject_TypeCheck(index, python.key_index) ? (KeyIndex *)index : NULL;
}

/* The table of the ledger is over the ledger's list of keys. */
Verdict enter(Folding *folding, PyObject *keys, const Batch *slots)
{
    KeyIndex *index = index_of(folding);
    if (index == NULL)
        return REFERENCE;
    index_prefetch(index, keys, slots->count);
    return index_enter(index, keys, slots);
}

PyObject *remove_keys(Folding *folding, const Batch *slots)
{
    KeyIndex *index = index_of(folding);
    PyObject *keys = PyTuple_New(slots->count);
    for (Py_ssize_t one = 0; keys != NULL && one < slots->count; one++) {
        PyObject *key = PyList_GetItem(index->key_of, (Py_ssize_t)slots->ids[one]);
        if (key == NULL)
            Py_CLEAR(keys);
        else {
            Py_INCREF(key);
            PyTuple_SetItem(keys, one, key);
        }
    }
    if (keys == NULL)
        return NULL;
    index_prefetch(index, keys, slots->count);
    for (Py_ssize_t one = 0; one < slots->count; one++) {
        PyObject *key = PyTuple_GetItem(keys, one);
        const int removed = index_remove(index, key);
        if (removed == 1)
            continue;
        if (removed == 0)
            PyErr_SetObject(PyExc_KeyError, key);
        Py_DECREF(keys);
        return NULL;
    }
    if (!set_field(folding, N_forgotten_at, folding->seq_object))
        Py_CLEAR(keys);
    return keys;
}
