/* `WitnessBody.watch`: follows events in the second book, folds them, and compares (kvsm/explain/verify/witness.py). */

#include "witness.h"

#include <stddef.h>

#define MOST_NUMBER ((long long)1 << 60)

/* -------------------------------------------------------------------------------------- comparison */

/* Whether an entry of the book means the same as a word of the ledger. */
static bool means(PyObject *entry, int32_t word, PyObject *const *entries, const int32_t *words, int count,
                  PyObject *reading)
{
    for (int one = 0; one < count; one++)
        if (entries[one] == entry)
            return words[one] == word;
    PyObject *number = PyLong_FromLong(word);
    PyObject *expected = number == NULL ? NULL : PyObject_GetItem(reading, number);
    const bool equal = expected != NULL && PyObject_RichCompareBool(expected, entry, Py_EQ) == 1;
    PyErr_Clear();
    Py_XDECREF(number);
    Py_XDECREF(expected);
    return equal;
}

static bool slots_agree(const Book *book, const Words *words)
{
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++) {
        const int64_t slot = book->now_slots.ids[one];
        if (!means(at(book->slots, slot), words->words[slot], books.slot_entries,
                   books.slot_words, NUM_SLOT_ENTRIES, books.slot_reading))
            return false;
    }
    return true;
}

/* Whether an unused slot is in the free queue, an idle one in the eviction order, and others are in neither. */
static bool lists_agree(const Book *book, Folding *ledger)
{
    const SlotQueue *free_slots = free_queue(ledger), *order = lru_queue(field(ledger, N_policy));
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++) {
        const int64_t slot = book->now_slots.ids[one];
        PyObject *entry = at(book->slots, slot);
        const bool unused = entry == slot_entry(GONE) || entry == slot_entry(FREE_ENTRY);
        bool is_in_order;
        if (order != NULL)
            is_in_order = queue_holds(order, (int32_t)slot);
        else {
            PyObject *number = PyLong_FromLongLong(slot);
            is_in_order = number != NULL && PySequence_Contains(field(ledger, N_policy), number) == 1;
            Py_XDECREF(number);
        }
        if (queue_holds(free_slots, (int32_t)slot) != unused || is_in_order != (entry == slot_entry(IDLE_ENTRY)))
            return false;
    }
    return true;
}

/* Whether the index names the held ones of these keys, and no other. */
static bool keys_agree(const Following *followed, Folding *ledger)
{
    const Py_ssize_t count = followed->keys == NULL ? 0 : PyObject_Size(followed->keys);
    const KeyIndex *index = index_of(ledger);
    for (Py_ssize_t one = 0; one < count; one++) {
        PyObject *key = PyTuple_CheckExact(followed->keys) ? PyTuple_GetItem(followed->keys, one) : at(followed->keys, one);
        PyObject *slot = PyDict_GetItemWithError(followed->book->held, key);
        int64_t expected = -1;
        if ((slot != NULL && !read_number(slot, &expected)) || index_find(index, key) != expected)
            return false;
    }
    return true;
}

static bool leases_agree(const Book *book, const Words *words)
{
    for (Py_ssize_t one = 0; one < book->now_blocks.count; one++) {
        const int64_t block = book->now_blocks.ids[one];
        if (!means(at(book->leases, block), words->words[block], books.lease_entries,
                   books.lease_words, NUM_LEASE_ENTRIES, books.lease_reading))
            return false;
    }
    return true;
}

/* The slots that are free, may be evicted, or are in the index. Copies to other tiers are left to Python. */
static bool counts_agree(const Book *book, Folding *ledger)
{
    const SlotQueue *free_slots = free_queue(ledger), *order = lru_queue(field(ledger, N_policy));
    if (free_slots == NULL || !is_empty(field(ledger, N_copied_out)))
        return false;
    const int64_t idle = order != NULL ? order->size : PyObject_Size(field(ledger, N_policy));
    return index_of(ledger)->size == PyDict_Size(book->held) && idle == book->idle && free_slots->size == book->free;
}

static bool same_number(PyObject *record, PyObject *other, Name name)
{
    int64_t found, expected;
    return get_number(record, name, &found) && get_number(other, name, &expected) && found == expected;
}

static bool is_true(PyObject *record, Name name)
{
    PyObject *value = attribute_of(record, name);
    Py_XDECREF(value);
    return value == Py_True;
}

static bool transfers_agree(const Book *book, Folding *ledger, PyObject *id)
{
    PyObject *booked = PyDict_GetItemWithError(book->transfers, id);
    PyObject *record = PyDict_GetItemWithError(field(ledger, N_transfers), id);
    int64_t word;
    if (booked == NULL || record == NULL)
        return booked == record;
    if (!same_number(record, booked, N_since) || !same_number(record, booked, N_reported) ||
        !get_number(record, N_word, &word))
        return false;
    const int expected = is_true(booked, N_abandoned)   ? TRANSFER_ABANDONED
                         : is_true(booked, N_submitted) ? TRANSFER_SUBMITTED
                                                        : TRANSFER_PLANNED;
    PyObject *epoch = attribute_of(record, N_epoch);
    const bool is_of_now =
        epoch != NULL && PyObject_RichCompareBool(epoch, field(ledger, N_epoch), Py_EQ) == 1;
    Py_XDECREF(epoch);
    return state_of((int32_t)word) == expected && is_of_now != (expected == TRANSFER_ABANDONED);
}

/* The keys that a load brought. Where a reset has come since, Python compares. */
static bool provenance_agrees(const Book *book, Folding *ledger)
{
    PyObject *provenance = field(ledger, N_provenance);
    PyObject *brought = attribute_of(provenance, N_brought);
    PyObject *stale = attribute_of(provenance, N_stale);
    bool agrees = brought != NULL && PyDict_CheckExact(brought) && stale != NULL && is_empty(stale) &&
                  PySet_Size(book->older) == 0;
    for (Py_ssize_t one = 0; agrees && one < book->now_blocks.count; one++) {
        PyObject *block = PyLong_FromLongLong(book->now_blocks.ids[one]);
        PyObject *found = block == NULL ? NULL : PyDict_GetItemWithError(brought, block);
        PyObject *expected = block == NULL ? NULL : PyDict_GetItemWithError(book->brought, block);
        agrees = found != NULL && expected != NULL &&
                 (found == expected || PyObject_RichCompareBool(found, expected, Py_EQ) == 1);
        Py_XDECREF(block);
    }
    Py_XDECREF(brought);
    Py_XDECREF(stale);
    return agrees;
}

static bool same_cursor(PyObject *request, Name name, PyObject *expected)
{
    PyObject *found = attribute_of(request, name);
    const bool same = found != NULL && (found == expected || PyObject_RichCompareBool(found, expected, Py_EQ) == 1);
    Py_XDECREF(found);
    return same;
}

static bool cursors_agree(const Book *book, Folding *ledger, PyObject *name)
{
    PyObject *request = named(ledger, name), *cursors = PyDict_GetItemWithError(book->cursors, name);
    PyObject *settled = python.no_ids, *offered = python.no_ids;
    if (cursors != NULL) {
        settled = PyTuple_GetItem(cursors, 0);
        offered = PyTuple_GetItem(cursors, 1);
    }
    if (request == NULL)
        return cursors == NULL;
    return same_cursor(request, N_settled, settled) && same_cursor(request, N_offered, offered);
}

/* What the request holds and waits for: a match, a load, a transfer. */
static bool asks_agree(const Book *book, Folding *ledger, PyObject *name)
{
    PyObject *request = named(ledger, name), *load = PyDict_GetItemWithError(book->loads, name);
    PyObject *wait = PyDict_GetItemWithError(book->waits, name);
    const bool matches = PyDict_Contains(book->matches, name) == 1;
    if (request == NULL)
        return !matches && load == NULL && wait == NULL;
    PyObject *pins = attribute_of(request, N_pins), *awaits = attribute_of(request, N_awaits);
    const bool waits = PyDict_Contains(field(ledger, N_deferred), name) == 1;
    int64_t found, expected = 0;
    const bool agree =
        pins != NULL && (PyObject_Size(pins) > 0) == matches && get_number(request, N_load, &found) &&
        (load == NULL || read_number(load, &expected)) && found == expected && waits == (wait != NULL) &&
        (wait == NULL || (awaits != NULL && PyObject_RichCompareBool(awaits, PyTuple_GetItem(wait, 0), Py_EQ) == 1));
    Py_XDECREF(pins);
    Py_XDECREF(awaits);
    return agree;
}

static bool requests_agree(const Following *followed, Folding *ledger)
{
    const Py_ssize_t count = followed->offers == NULL ? 0 : PyTuple_Size(followed->offers);
    for (Py_ssize_t one = 0; one < count; one++)
        if (!cursors_agree(followed->book, ledger, PyTuple_GetItem(PyTuple_GetItem(followed->offers, one), 0)))
            return false;
    return followed->name == NULL ||
           (asks_agree(followed->book, ledger, followed->name) &&
            (!followed->restarts || cursors_agree(followed->book, ledger, followed->name)));
}

/* Whether as many keys are remembered as offered. */
static bool offers_agree(const Book *book, Folding *ledger)
{
    PyObject *times = attribute_of(field(ledger, N_offers), N_times);
    const bool agree = times != NULL && PyObject_Size(times) == PyObject_Size(book->offers);
    Py_XDECREF(times);
    return agree;
}

static bool ends_agree(const Book *book, Folding *ledger)
{
    int64_t found, expected;
    PyObject *ended = field(ledger, N_ended_at), *forgotten = field(ledger, N_forgotten_at);
    return (ended == book->last_end ||
            (read_number(ended, &found) && read_number(book->last_end, &expected) && found == expected)) &&
           (forgotten == book->last_loss ||
            (read_number(forgotten, &found) && read_number(book->last_loss, &expected) && found >= expected));
}

/* Whether the ledger is what the book says, as far as the event goes. Otherwise Python compares, and tells. */
static bool agree(const Following *followed, Folding *ledger)
{
    const Book *book = followed->book;
    const bool found =
        see_state(ledger) && ledger->fold->blocks.size == PyList_Size(book->slots) &&
        ledger->fold->leases.size == PyList_Size(book->leases) &&
        (book->now_slots.count == 0 ||
         (slots_agree(book, &ledger->fold->blocks) && counts_agree(book, ledger) && lists_agree(book, ledger))) &&
        keys_agree(followed, ledger) &&
        leases_agree(book, &ledger->fold->leases) &&
        (followed->transfer == NULL || transfers_agree(book, ledger, followed->transfer)) &&
        (!followed->brings || provenance_agrees(book, ledger)) &&
        requests_agree(followed, ledger) &&
        PyDict_Size(field(ledger, N_deferred)) == PyDict_Size(book->waits) && offers_agree(book, ledger) && ends_agree(book, ledger) &&
        PyObject_Size(followed->published) == PyList_Size(followed->told);
    PyErr_Clear();
    return found;
}

/* ------------------------------------------------------------------------------------------- watch */

static PyObject *numbers(const Ids *ids)
{
    PyObject *list = PyList_New(ids->count);
    for (Py_ssize_t one = 0; list != NULL && one < ids->count; one++)
        PyList_SetItem(list, one, PyLong_FromLongLong(ids->ids[one]));
    return list;
}

static bool note(Book *book, const char *name, PyObject *value)
{
    const bool done = value != NULL && PyObject_SetAttrString((PyObject *)book, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *requests_of(const Following *followed)
{
    const Py_ssize_t count = followed->offers == NULL ? 0 : PyTuple_Size(followed->offers);
    PyObject *names = PyList_New(0);
    for (Py_ssize_t one = 0; names != NULL && one < count; one++)
        PyList_Append(names, PyTuple_GetItem(PyTuple_GetItem(followed->offers, one), 0));
    if (names != NULL && followed->restarts)
        PyList_Append(names, followed->name);
    return names;
}

static PyObject *asks_of(const Following *followed)
{
    PyObject *names = PyList_New(0);
    if (names != NULL && followed->name != NULL)
        PyList_Append(names, followed->name);
    return names;
}

/* Tell Python's comparison what the event changes. */
static bool note_changes(const Following *followed)
{
    Book *book = followed->book;
    const Ids none = {0};
    PyObject *transfer = followed->transfer != NULL ? followed->transfer : python.zero;
    Py_INCREF(transfer);
    return note(book, "_now_slots", numbers(&book->now_slots)) &&
           note(book, "_now_blocks", numbers(&book->now_blocks)) &&
           note(book, "_now_brought", numbers(followed->brings ? &book->now_blocks : &none)) &&
           note(book, "_now_requests", requests_of(followed)) && note(book, "_now_transfer", transfer) &&
           note(book, "_now_asks", asks_of(followed)) &&
           note(book, "_now_keys", PySequence_List(followed->keys != NULL ? followed->keys : python.no_ids));
}

/* Fold the event. NULL: done. Otherwise the error with which the ledger refuses it; owned. */
static PyObject *refusal_of(Folding *ledger, PyObject *event)
{
    PyObject *kind, *error, *trace, *ended = fold_next(ledger, event);
    Py_XDECREF(ended);
    if (ended != NULL)
        return NULL;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    Py_XDECREF(kind);
    Py_XDECREF(trace);
    return error;
}

/* Follow, fold and compare an event. true: all is well. Otherwise an error is set, or it is left to Python: folded,
   refused, or as it was. */
static bool watch_one(Following *following, Folding *ledger, PyObject *event, bool *is_folded, PyObject **refusal)
{
    following->event = event;
    following->kind = kind_of(event);
    following->seq_object = attribute_of(event, N_seq);
    const bool is_numbered = read_number(following->seq_object, &following->seq);
    PyErr_Clear();
    bool well = is_numbered && follow(following) == FOLDED;
    *is_folded = false;
    if (well) {
        *refusal = refusal_of(ledger, event);
        *is_folded = *refusal == NULL;
        well = *is_folded && agree(following, ledger);
        if (*is_folded && !well)
            note_changes(following);
    }
    Py_XDECREF(following->seq_object);
    following_clear(following);
    return well;
}

/* watch(ledger, events, place, told, published): as `Witness.watch` in Python. */
static PyObject *py_watch(PyObject *self, PyObject *arguments)
{
    PyObject *ledger, *events, *told, *published, *refusal = NULL;
    Py_ssize_t place;
    Following following = {.book = (Book *)self};
    Folding folding;
    bool is_folded = false;
    if (!PyArg_ParseTuple(arguments, "OO!nO!O!", &ledger, &PyList_Type, &events, &place, &PyList_Type, &told,
                          &PyList_Type, &published))
        return NULL;
    if (place < 0)
        return PyErr_Format(PyExc_ValueError, "place is %zd; it must be 0 or more", place);
    if (following.book->is_followed)
        return PyErr_Format(PyExc_RuntimeError, "this witness follows an event");
    following.told = told;
    following.published = published;
    following.book->is_followed = true;
    if ((PyObject *)Py_TYPE(ledger) == books.ledger && book_is_known(following.book)) {
        bool well = fold_begin(&folding, ledger);
        while (well && place < PyList_Size(events)) {
            PyObject *event = PyList_GetItem(events, place);
            Py_INCREF(event);
            well = watch_one(&following, &folding, event, &is_folded, &refusal);
            place += well;
            Py_DECREF(event);
        }
        fold_end(&folding);
    }
    following.book->is_followed = false;
    if (refusal != NULL && !PyObject_IsInstance(refusal, PyExc_Exception))
        PyErr_SetObject((PyObject *)Py_TYPE(refusal), refusal); /* Ctrl-C, for example */
    PyObject *left = PyErr_Occurred() ? NULL
                                      : Py_BuildValue("(nOO)", place, is_folded ? Py_True : Py_False,
                                                      refusal != NULL ? refusal : Py_None);
    Py_XDECREF(refusal);
    return left;
}

/* --------------------------------------------------------------------------------------- its type */

/* connect_witness(BookedTransfer, NativeLedger, slots, leases, slot_reading, lease_reading): take what it needs of
   Python. slots, leases: the usual entries, each with the word that means the same, in the order of witness.h. */
static bool take_entries(PyObject *pairs, PyObject **entries, int32_t *words, Py_ssize_t count)
{
    if (!PyTuple_Check(pairs) || PyTuple_Size(pairs) != count) {
        PyErr_SetString(PyExc_ImportError, "the native body was built for other entries of the second book");
        return false;
    }
    for (Py_ssize_t one = 0; one < count; one++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, one), "O!i", &PyTuple_Type, &entries[one], &words[one]))
            return false;
        else
            Py_INCREF(entries[one]);
    return true;
}

PyObject *connect_witness(PyObject *module, PyObject *arguments)
{
    PyObject *slots, *leases;
    BookNames made = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO!OOOO", &made.booked_transfer, &PyType_Type, &made.ledger, &slots, &leases,
                          &made.slot_reading, &made.lease_reading) || !is_ledger_class(made.ledger) ||
        !take_entries(slots, made.slot_entries, made.slot_words, NUM_SLOT_ENTRIES) ||
        !take_entries(leases, made.lease_entries, made.lease_words, NUM_LEASE_ENTRIES))
        return NULL;
    PyObject *module_of_arrays = PyImport_ImportModule("array");
    made.array = module_of_arrays == NULL ? NULL : PyObject_GetAttrString(module_of_arrays, "array");
    Py_XDECREF(module_of_arrays);
    if (made.array == NULL)
        return NULL;
    Py_INCREF(made.booked_transfer);
    Py_INCREF(made.ledger);
    Py_INCREF(made.slot_reading);
    Py_INCREF(made.lease_reading);
    books = made; /* in one assignment */
    Py_RETURN_NONE;
}

/* An attribute and its place in a book. */
typedef struct {
    const char *name;
    bool is_number;
    size_t offset;
} Member;

static PyObject *get_member(PyObject *self, void *closure)
{
    const Member *member = closure;
    const char *place = (const char *)self + member->offset;
    if (member->is_number)
        return PyLong_FromLongLong(*(const long long *)place);
    PyObject *object = *(PyObject *const *)place;
    if (object == NULL)
        return PyErr_Format(PyExc_AttributeError, "this witness has no %s yet", member->name);
    Py_INCREF(object);
    return object;
}

static int set_member(PyObject *self, PyObject *value, void *closure)
{
    const Member *member = closure;
    char *place = (char *)self + member->offset;
    if (value == NULL || ((Book *)self)->is_followed) {
        PyErr_Format(PyExc_RuntimeError, value == NULL ? "%s is part of a witness" : "%s stays while events are followed",
                     member->name);
        return -1;
    }
    if (!member->is_number) {
        PyObject *before = *(PyObject **)place;
        Py_INCREF(value);
        *(PyObject **)place = value;
        Py_XDECREF(before);
        return 0;
    }
    const long long number = PyLong_AsLongLong(value);
    if (!PyErr_Occurred() && (number < -MOST_NUMBER || number > MOST_NUMBER))
        PyErr_Format(PyExc_OverflowError, "%s is %lld", member->name, number);
    if (PyErr_Occurred())
        return -1;
    *(long long *)place = number;
    return 0;
}

#define OBJECT(name) {"_" #name, false, offsetof(Book, name)}
#define NUMBER(name) {"_" #name, true, offsetof(Book, name)}

static Member members[] = {
    OBJECT(slots),   OBJECT(leases),      OBJECT(keys),   OBJECT(held),      OBJECT(transfers), OBJECT(matches),
    OBJECT(loads),   OBJECT(waits),
    OBJECT(spoiled), OBJECT(brought),     OBJECT(older),  OBJECT(cursors),   OBJECT(may_go_back), OBJECT(offers),
    OBJECT(tick),    OBJECT(last_void),   OBJECT(last_end), OBJECT(last_loss), NUMBER(free),     NUMBER(idle),
    NUMBER(chunk),   NUMBER(workers),
};

#define NUM_MEMBERS (sizeof members / sizeof *members)

/* One for each member, and the end; filled when the type is made. */
static PyGetSetDef attributes[NUM_MEMBERS + 1];

void witness_begin_type(void)
{
    for (size_t one = 0; one < NUM_MEMBERS; one++)
        attributes[one] =
            (PyGetSetDef){.name = members[one].name, .get = get_member, .set = set_member, .closure = &members[one]};
}

static PyMethodDef methods[] = {
    {"watch", py_watch, METH_VARARGS, "As `Witness.watch` in Python."},
    {NULL, NULL, 0, NULL},
};

static void witness_dealloc(PyObject *self)
{
    Book *book = (Book *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (size_t one = 0; one < NUM_MEMBERS; one++)
        if (!members[one].is_number)
            Py_CLEAR(*(PyObject **)((char *)book + members[one].offset));
    free(book->now_slots.ids);
    free(book->now_blocks.ids);
    free(book->named.ids);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native part of a witness: its attributes, and what it does with common events."},
    {Py_tp_dealloc, witness_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec witness_spec = {
    .name = "kvsm.core.native._body.WitnessBody",
    .basicsize = sizeof(Book),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
