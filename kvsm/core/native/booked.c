/* Transfers in the second book: they leave, and end well (kvsm/explain/verify/book.py). */

#include "witness.h"

static bool flag(PyObject *record, Name name)
{
    PyObject *value = attribute_of(record, name);
    PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_True;
}

static bool read_field(PyObject *record, Name name, Ids *read, Py_ssize_t below, bool more)
{
    PyObject *ids = attribute_of(record, name);
    if (!more)
        read->count = 0;
    const bool fits = ids != NULL && read_more(ids, read, below);
    PyErr_Clear();
    Py_XDECREF(ids);
    return fits;
}

/* The transfer of this number, as it is kept in the book; borrowed. NULL: there is none. */
static PyObject *booked(const Book *book, PyObject *id)
{
    PyObject *transfer = PyDict_GetItemWithError(book->transfers, id);
    PyErr_Clear();
    return transfer;
}

/* Whether these are plans that wait, each named once. Their slots are then read. */
static bool may_submit(Book *book, PyObject *ids)
{
    const Py_ssize_t count = PyTuple_Size(ids);
    book->now_slots.count = 0;
    if (count > 4 * SMALL)
        return false;
    for (Py_ssize_t one = 0; one < count; one++) {
        PyObject *transfer = booked(book, PyTuple_GetItem(ids, one));
        if (transfer == NULL || flag(transfer, N_submitted) ||
            !read_field(transfer, N_slots, &book->now_slots, PyList_Size(book->slots), true))
            return false;
        for (Py_ssize_t earlier = 0; earlier < one; earlier++)
            if (booked(book, PyTuple_GetItem(ids, earlier)) == transfer)
                return false;
    }
    return true;
}

Verdict submitted(Following *following)
{
    Book *book = following->book;
    PyObject *ids = event_field(following, N_transfers);
    Verdict verdict = REFERENCE;
    const Py_ssize_t count = ids != NULL && PyTuple_CheckExact(ids) ? PyTuple_Size(ids) : -1;
    Py_ssize_t place = 0;
    if (count < 0 || !may_submit(book, ids))
        goto end;
    verdict = FOLDED;
    for (Py_ssize_t one = 0; verdict == FOLDED && one < count; one++) {
        PyObject *transfer = booked(book, PyTuple_GetItem(ids, one));
        Py_XINCREF(transfer);
        PyObject *slots = attribute_of(transfer, N_slots);
        const bool store = flag(transfer, N_store);
        const Py_ssize_t its = slots == NULL ? 0 : PyObject_Size(slots);
        if (slots == NULL || PyObject_SetAttr(transfer, name_of(N_submitted), Py_True) < 0 ||
            PyObject_SetAttr(transfer, name_of(N_since), book->tick) < 0)
            verdict = FAILED;
        Py_XDECREF(transfer);
        Py_XDECREF(slots);
        for (const Py_ssize_t end = place + its; place < end && place < book->now_slots.count; place++)
            if (store)
                put(book->slots, book->now_slots.ids[place], slot_entry(FILLING));
    }
    if (count > 0) {
        following->transfer = PyTuple_GetItem(ids, count - 1);
        Py_INCREF(following->transfer);
    }
end:
    Py_XDECREF(ids);
    return verdict;
}

/* Whether the good end of this transfer is nothing rare. Its slots and device blocks are then read. While requests
   wait, Python looks who wakes. */
static bool may_end(Book *book, PyObject *transfer, bool store)
{
    if (PyDict_Size(book->waits) > 0 || !read_field(transfer, N_slots, &book->now_slots, PyList_Size(book->slots), false) ||
        !read_field(transfer, N_device_blocks, &book->now_blocks, PyList_Size(book->leases), false) ||
        !all_are(book->leases, &book->now_blocks, lease_entry(store ? READ_ONCE : WRITTEN)))
        return false;
    return store ? PyObject_Size(book->offers) == 0 && all_are(book->slots, &book->now_slots, slot_entry(FILLING))
                 : all_are_loading(book);
}

/* The last worker has reported it as good: publish what it stored, or end its readers. Its device blocks are given
   back. */
static Verdict end(Following *following, PyObject *transfer, bool store)
{
    Book *book = following->book;
    if (store) {
        PyObject *keys = keys_of(book);
        const bool done = tell(following, false, keys);
        Py_XDECREF(keys);
        if (!done)
            return FAILED;
        put_all(book->slots, &book->now_slots, slot_entry(IDLE_ENTRY));
        book->idle += book->now_slots.count;
    }
    if (!store) {
        following->name = attribute_of(transfer, N_request);
        if (following->name == NULL || !drop(book->loads, following->name))
            return FAILED;
    }
    for (Py_ssize_t one = 0; !store && one < book->now_slots.count; one++)
        if (!recount(book, book->now_slots.ids[one], READ, IDLE_ENTRY, -1, 0))
            return FAILED;
    put_all(book->leases, &book->now_blocks, lease_entry(UNLEASED));
    replace(&book->last_end, following->seq_object);
    return PyDict_DelItem(book->transfers, following->transfer) < 0 ? FAILED : FOLDED;
}

Verdict reported(Following *following)
{
    Book *book = following->book;
    PyObject *id = event_field(following, N_transfer), *number = event_field(following, N_worker);
    PyObject *good = event_field(following, N_good), *transfer = id == NULL ? NULL : booked(book, id);
    Verdict verdict = REFERENCE;
    int64_t worker, before;
    if (transfer == NULL || good != Py_True || !read_number(number, &worker) || worker >= book->workers ||
        book->workers >= 62 || !get_number(transfer, N_reported, &before) || before >> worker & 1 ||
        !flag(transfer, N_submitted) || flag(transfer, N_failed) || flag(transfer, N_abandoned))
        goto end;
    const int64_t after = before | (int64_t)1 << worker;
    const bool last = after == ((int64_t)1 << book->workers) - 1, store = flag(transfer, N_store);
    if (last && !may_end(book, transfer, store))
        goto end;
    Py_INCREF(id);
    following->transfer = id;
    verdict = last ? end(following, transfer, store) : set_number(transfer, N_reported, after) ? FOLDED : FAILED;
end:
    Py_XDECREF(id);
    Py_XDECREF(number);
    Py_XDECREF(good);
    return verdict;
}
