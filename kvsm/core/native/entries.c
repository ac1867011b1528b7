/* What the second book is made of: ids and entries, as C reads and makes them (kvsm/explain/verify/book.py). */

#include "witness.h"

BookNames books;

/* ---------------------------------------------------------------------------------------------- ids */

static bool has_room(Ids *ids, Py_ssize_t count)
{
    if (count <= ids->room)
        return true;
    int64_t *grown = realloc(ids->ids, (size_t)count * 2 * sizeof *grown);
    if (grown == NULL)
        return false;
    ids->ids = grown;
    ids->room = count * 2;
    return true;
}

/* Append the numbers in memory of int64. */
static bool read_memory(const int64_t *ids, Py_ssize_t count, Ids *read, Py_ssize_t below)
{
    bool fit = has_room(read, read->count + count);
    for (Py_ssize_t one = 0; fit && one < count; one++) {
        fit = ids[one] >= 0 && ids[one] < below;
        read->ids[read->count + one] = ids[one];
    }
    read->count += fit ? count : 0;
    return fit;
}

/* Append the numbers of an array that `kept_ids` has made. */
static bool read_array(PyObject *array, Ids *read, Py_ssize_t below)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_CONTIG_RO) < 0)
        return false;
    const bool fit = buffer.itemsize == sizeof(int64_t) && is_aligned(&buffer) &&
                     read_memory(buffer.buf, buffer.len / (Py_ssize_t)sizeof(int64_t), read, below);
    PyBuffer_Release(&buffer);
    return fit;
}

bool read_more(PyObject *ids, Ids *read, Py_ssize_t below)
{
    if (ids == NULL)
        return false;
    const bool is_tuple = PyTuple_CheckExact(ids);
    if (!is_tuple && !PyList_CheckExact(ids))
        return read_array(ids, read, below);
    const Py_ssize_t count = is_tuple ? PyTuple_Size(ids) : PyList_Size(ids);
    if (!has_room(read, read->count + count))
        return false;
    for (Py_ssize_t one = 0; one < count; one++) {
        int64_t id;
        if (!read_number(is_tuple ? PyTuple_GetItem(ids, one) : PyList_GetItem(ids, one), &id) || id >= below)
            return false;
        read->ids[read->count++] = id;
    }
    return true;
}

bool read_ids(PyObject *ids, Ids *read, Py_ssize_t below)
{
    read->count = 0;
    return read_more(ids, read, below);
}

PyObject *event_field(const Following *following, Name name)
{
    PyObject *value = attribute_of(following->event, name);
    if (value == NULL)
        PyErr_Clear();
    return value;
}

/* The ids in a field of the event, as numbers and, if `object` is asked for, as the book keeps them; owned. Packed
   ones are kept as an array, which has no object for each number. */
bool ids_of(const Following *following, Name name, Ids *read, Py_ssize_t below, PyObject **object)
{
    PyObject *ids = event_field(following, name), *kept = NULL;
    bool fit = ids != NULL;
    read->count = 0;
    if (fit && PyBytes_CheckExact(ids)) {
        PyObject *numbers = unpacked(ids);
        const Py_ssize_t count = numbers == NULL ? 0 : PyBytes_Size(numbers) / (Py_ssize_t)sizeof(int64_t);
        fit = count > SMALL && read_memory((const int64_t *)PyBytes_AsString(numbers), count, read, below);
        if (fit && object != NULL)
            fit = (kept = PyObject_CallFunction(books.array, "sO", "q", numbers)) != NULL;
        Py_XDECREF(numbers);
    } else if (fit) {
        fit = PyTuple_CheckExact(ids) && read_ids(ids, read, below);
        Py_INCREF(ids);
        kept = ids;
    }
    if (fit && object != NULL) {
        *object = kept;
        kept = NULL;
    }
    Py_XDECREF(kept);
    Py_XDECREF(ids);
    return fit;
}

bool slots_of(const Following *following, PyObject **object)
{
    Book *book = following->book;
    return ids_of(following, N_slots, &book->now_slots, PyList_Size(book->slots), object);
}

bool blocks_of(const Following *following, PyObject **object)
{
    Book *book = following->book;
    return ids_of(following, N_device_blocks, &book->now_blocks, PyList_Size(book->leases), object);
}

/* ------------------------------------------------------------------------------------------ entries */

bool same(PyObject *entry, PyObject *usual)
{
    if (entry == usual)
        return true;
    const int equal = PyObject_RichCompareBool(entry, usual, Py_EQ);
    if (equal < 0)
        PyErr_Clear();
    return equal > 0;
}

bool all_are(PyObject *list, const Ids *ids, PyObject *usual)
{
    for (Py_ssize_t one = 0; one < ids->count; one++)
        if (!same(at(list, ids->ids[one]), usual))
            return false;
    return true;
}

void put_all(PyObject *list, const Ids *ids, PyObject *entry)
{
    for (Py_ssize_t one = 0; one < ids->count; one++)
        put(list, ids->ids[one], entry);
}

/* A slot's entry: its state, which is a member, and two counts. */
typedef struct {
    PyObject *state;
    int64_t copies, pins;
} Parts;

static bool parts_of(PyObject *entry, Parts *parts)
{
    if (!PyTuple_CheckExact(entry) || PyTuple_Size(entry) != 3)
        return false;
    parts->state = PyTuple_GetItem(entry, 0);
    return read_number(PyTuple_GetItem(entry, 1), &parts->copies) &&
           read_number(PyTuple_GetItem(entry, 2), &parts->pins);
}

static PyObject *stored(void) { return PyTuple_GetItem(slot_entry(IDLE_ENTRY), 0); }
static PyObject *loading(void) { return PyTuple_GetItem(slot_entry(READ), 0); }

static bool is_readable(PyObject *entry)
{
    if (entry == slot_entry(IDLE_ENTRY) || entry == slot_entry(PINNED) || entry == slot_entry(READ))
        return true;
    Parts parts;
    return parts_of(entry, &parts) && (parts.state == stored() || parts.state == loading());
}

bool all_are_readable(const Book *book)
{
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++)
        if (!is_readable(at(book->slots, book->now_slots.ids[one])))
            return false;
    return true;
}

/* Put an entry of these parts, the book's own object if it has one. Counts idle slots. */
static bool put_parts(Book *book, int64_t slot, const Parts *parts)
{
    PyObject *entry = NULL;
    if (parts->state == stored() && parts->copies == 0 && parts->pins < 2)
        entry = slot_entry(parts->pins ? PINNED : IDLE_ENTRY);
    else if (parts->state == loading() && parts->copies == 1 && parts->pins == 0)
        entry = slot_entry(READ);
    book->idle += (entry == slot_entry(IDLE_ENTRY)) - same(at(book->slots, slot), slot_entry(IDLE_ENTRY));
    if (entry != NULL) {
        put(book->slots, slot, entry);
        return true;
    }
    entry = Py_BuildValue("(OLL)", parts->state, (long long)parts->copies, (long long)parts->pins);
    return entry != NULL && PyList_SetItem(book->slots, (Py_ssize_t)slot, entry) == 0;
}

bool recount(Book *book, int64_t slot, SlotEntry from, SlotEntry to, int64_t copies, int64_t pins)
{
    PyObject *entry = at(book->slots, slot);
    Parts parts;
    if (entry == slot_entry(from)) {
        book->idle += (to == IDLE_ENTRY) - (from == IDLE_ENTRY);
        put(book->slots, slot, slot_entry(to));
        return true;
    }
    if (!parts_of(entry, &parts))
        return false;
    parts.copies += copies;
    parts.pins += pins;
    if (copies != 0)
        parts.state = parts.copies > 0 ? loading() : stored();
    return put_parts(book, slot, &parts);
}

/* Whether all slots have this entry, or can be read and have at least these numbers of copies and pins. */
static bool all_have(const Book *book, SlotEntry usual, int64_t copies, int64_t pins)
{
    Parts parts;
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++) {
        PyObject *entry = at(book->slots, book->now_slots.ids[one]);
        if (entry != slot_entry(usual) && !(is_readable(entry) && parts_of(entry, &parts) &&
                                            parts.copies >= copies && parts.pins >= pins))
            return false;
    }
    return true;
}

bool all_are_pinned(const Book *book) { return all_have(book, PINNED, 0, 1); }

bool all_are_loading(const Book *book) { return all_have(book, READ, 1, 0); }
