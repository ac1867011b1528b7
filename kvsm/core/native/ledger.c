/* `FoldBody.apply`, which folds one event, and the handler of each kind of event (kvsm/core/ledger/ledger.py). */

#include "body.h"

typedef Verdict (*Handler)(Folding *);

/* Kinds without a handler here are left to Python. */
static const Handler handlers[NUM_KINDS] = {
    [KIND_RequestArrived] = request_arrived,
    [KIND_RequestPreempted] = request_preempted,
    [KIND_RequestFinished] = request_finished,
    [KIND_HitMatched] = hit_matched,
    [KIND_HitReleased] = hit_released,
    [KIND_RequestDeferred] = request_deferred,
    [KIND_BlocksEvicted] = blocks_evicted,
    [KIND_StorePlanned] = store_planned,
    [KIND_StoreSkipped] = store_skipped,
    [KIND_LoadPlanned] = load_planned,
    [KIND_TransfersSubmitted] = transfers_submitted,
    [KIND_TransferCancelled] = transfer_cancelled,
    [KIND_WorkerReported] = worker_reported,
    [KIND_ReportRejected] = only_recorded,
    [KIND_BlocksTouched] = blocks_touched,
    [KIND_FlushRequested] = flush_requested,
    [KIND_CacheReset] = cache_reset,
    [KIND_StepEnded] = only_recorded,
    [KIND_Ticked] = ticked,
    [KIND_BlocksOffered] = blocks_offered,
    [KIND_RequestAdmitted] = request_admitted,
};

/* Kinds that change blocks, or the keys in them. */
static const bool touches_blocks[NUM_KINDS] = {
    [KIND_RequestPreempted] = true,
    [KIND_RequestFinished] = true,
    [KIND_HitMatched] = true,
    [KIND_HitReleased] = true,
    [KIND_BlocksEvicted] = true,
    [KIND_StorePlanned] = true,
    [KIND_LoadPlanned] = true,
    [KIND_TransfersSubmitted] = true,
    [KIND_TransferCancelled] = true,
    [KIND_WorkerReported] = true,
    [KIND_BlocksTouched] = true,
    [KIND_CacheReset] = true,
};

Verdict only_recorded(Folding *folding)
{
    (void)folding;
    return FOLDED;
}

/* ---------------------------------------------------------------------------------- small questions */

bool set_field(Folding *folding, Name name, PyObject *value)
{
    PyObject *before = folding->seen[name];
    if (value == NULL)
        return false;
    if (before == NULL)
        folding->read[folding->num_read++] = name;
    Py_INCREF(value);
    folding->seen[name] = value;
    Py_XDECREF(before);
    return PyDict_SetItem(folding->fields, name_of(name), value) == 0;
}

void forget_seen(Folding *folding)
{
    while (folding->num_read > 0) {
        PyObject **seen = &folding->seen[folding->read[--folding->num_read]];
        Py_CLEAR(*seen);
    }
}

/* The descriptor of a field; borrowed. NULL: the attribute is looked up by its name. */
static PyObject *member_of(PyObject *owner, Name name)
{
    const PyTypeObject *class = Py_TYPE(owner);
    for (int one = 0; one < NUM_MEMBER_CLASSES; one++)
        if ((PyObject *)class == python.member_classes[one].class)
            return python.member_classes[one].members[name];
    return NULL;
}

PyObject *attribute_of(PyObject *owner, Name name)
{
    PyObject *member = owner == NULL ? NULL : member_of(owner, name);
    if (member != NULL)
        return python.get_member(member, owner, NULL);
    if (owner != NULL)
        return PyObject_GetAttr(owner, name_of(name));
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_AttributeError, "an attribute of the ledger is missing");
    return NULL;
}

bool set_attribute(PyObject *owner, Name name, PyObject *value)
{
    PyObject *member = member_of(owner, name);
    return (member != NULL ? python.set_member(member, owner, value)
                           : PyObject_SetAttr(owner, name_of(name), value)) == 0;
}

bool get_number(PyObject *owner, Name name, int64_t *value)
{
    PyObject *number = owner == NULL ? NULL : attribute_of(owner, name);
    const bool read = read_number(number, value);
    Py_XDECREF(number);
    return read;
}

bool set_number(PyObject *owner, Name name, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    const bool done = number != NULL && set_attribute(owner, name, number);
    Py_XDECREF(number);
    return done;
}

bool field_number(Folding *folding, Name name, int64_t *value) { return read_number(field(folding, name), value); }

bool is_empty(PyObject *container)
{
    if (container == NULL)
        return true;
    return PyDict_Check(container) ? PyDict_Size(container) == 0 : PyObject_Size(container) == 0;
}

bool same_text(PyObject *text, PyObject *other)
{
    return text == other || (PyUnicode_CheckExact(text) && PyUnicode_Compare(text, other) == 0);
}

/* ------------------------------------------------------------------------- where the memory is */

/* The memory of an attribute of a `StateWords`, of items of this size. false: it is no such memory. */
static bool see_array(PyObject *owner, Name name, Py_ssize_t item, Py_buffer *buffer)
{
    PyObject *array = attribute_of(owner, name);
    const bool seen = array != NULL && PyObject_GetBuffer(array, buffer, PyBUF_CONTIG) == 0;
    Py_XDECREF(array);
    if (!seen)
        return false;
    if (buffer->itemsize == item && is_aligned(buffer) && buffer->len / item < INT32_MAX)
        return true;
    PyBuffer_Release(buffer);
    return false;
}

/* Map the arrays behind a `StateWords` again if they have been replaced. */
static bool see_words(Words *words, const Machine *machine, PyObject *owner)
{
    if (owner == words->owner)
        return owner != NULL;
    if (words->owner != NULL) {
        PyBuffer_Release(&words->buffer);
        PyBuffer_Release(&words->totals_buffer);
    }
    Py_CLEAR(words->owner);
    if (owner == NULL || !see_array(owner, N_words, sizeof(int32_t), &words->buffer))
        return false;
    if (!see_array(owner, N_totals, sizeof(int64_t), &words->totals_buffer)) {
        PyBuffer_Release(&words->buffer);
        return false;
    }
    Py_INCREF(owner);
    words->machine = machine;
    words->owner = owner;
    words->words = words->buffer.buf;
    words->size = (int32_t)(words->buffer.len / (Py_ssize_t)sizeof(int32_t));
    words->totals = words->totals_buffer.buf;
    if (words->totals_buffer.len / (Py_ssize_t)sizeof(int64_t) == STATE_MASK + 1 + machine->num_counters)
        return true;
    see_words(words, machine, NULL);
    return false;
}

static bool see_generation(Fold *fold, PyObject *owner)
{
    if (owner == fold->generation_owner)
        return owner != NULL && fold->generation_size == fold->blocks.size;
    if (fold->generation_owner != NULL)
        PyBuffer_Release(&fold->generation_buffer);
    Py_CLEAR(fold->generation_owner);
    if (owner == NULL || PyObject_GetBuffer(owner, &fold->generation_buffer, PyBUF_CONTIG) < 0)
        return false;
    if (fold->generation_buffer.itemsize != sizeof(int64_t) || !is_aligned(&fold->generation_buffer)) {
        PyBuffer_Release(&fold->generation_buffer);
        return false;
    }
    Py_INCREF(owner);
    fold->generation_owner = owner;
    fold->generation = fold->generation_buffer.buf;
    fold->generation_size = fold->generation_buffer.len / (Py_ssize_t)sizeof(int64_t);
    return fold->generation_size == fold->blocks.size;
}

static bool is_dict(Folding *folding, Name name)
{
    PyObject *value = field(folding, name);
    return value != NULL && PyDict_CheckExact(value);
}

/* Whether requests and transfers are kept as this body knows it. A test may have made a ledger otherwise. */
static bool see_records(Folding *folding)
{
    return is_dict(folding, N_transfers) && is_dict(folding, N_requests) && is_dict(folding, N_deferred);
}

/* The same of blocks. */
static bool see_blocks(Folding *folding)
{
    Fold *fold = folding->fold;
    PyObject *key_of = field(folding, N_key_of);
    const KeyIndex *index = index_of(folding);
    return see_words(&fold->blocks, &BLOCK, field(folding, N_blocks)) &&
           see_words(&fold->leases, &LEASE, field(folding, N_leases)) &&
           see_generation(fold, field(folding, N_generation)) && key_of != NULL && PyList_CheckExact(key_of) &&
           PyList_Size(key_of) == fold->blocks.size && index != NULL && index->key_of == key_of &&
           index->capacity == fold->blocks.size;
}

/* ------------------------------------------------------------------------------------------- apply */

static int kind_of(PyObject *event)
{
    for (int kind = 0; kind < NUM_KINDS; kind++)
        if ((PyObject *)Py_TYPE(event) == python.kinds[kind])
            return kind;
    return -1;
}

PyObject *value_of(Folding *folding, Name name)
{
    if (folding->values != NULL && folding->kind >= 0) {
        const Name *fields = python.fields[folding->kind];
        const Py_ssize_t count = PyTuple_Size(folding->values);
        for (Py_ssize_t one = 0; one < count && one < MOST_FIELDS; one++)
            if (fields[one] == name) {
                PyObject *value = PyTuple_GetItem(folding->values, one);
                Py_INCREF(value);
                return value;
            }
    }
    PyObject *value = attribute_of(folding->event, name);
    if (value == NULL)
        PyErr_Clear();
    return value;
}

static Verdict fold_known(Folding *folding)
{
    const int kind = folding->kind;
    int64_t before;
    if (folding->fold->frozen != NULL)
        keep_for_event(folding, kind);
    if (handlers[kind] == NULL || folding->seq_object == NULL ||
        !read_number(folding->seq_object, &folding->seq) || !field_number(folding, N_seq, &before) ||
        folding->seq != before + 1 || !see_records(folding) || (touches_blocks[kind] && !see_blocks(folding)))
        return REFERENCE;
    const Verdict verdict = handlers[kind](folding);
    if (verdict != FOLDED)
        return verdict;
    PyObject *step = value_of(folding, N_step);
    const bool done = set_field(folding, N_seq, folding->seq_object) &&
                      (step == field(folding, N_step) || set_field(folding, N_step, step));
    Py_XDECREF(step);
    return done ? FOLDED : FAILED;
}

static Verdict fold_here(Folding *folding)
{
    if (folding->kind < 0 || folding->fields == NULL)
        return REFERENCE;
    folding->fold->folds = true;
    const Verdict verdict = fold_known(folding);
    folding->fold->folds = false;
    return verdict;
}

bool see_state(Folding *folding) { return see_records(folding) && see_blocks(folding); }

bool is_ledger_class(PyObject *class)
{
    if (PyType_Check(class) && PyType_IsSubtype((PyTypeObject *)class, python.fold))
        return true;
    PyErr_SetString(PyExc_TypeError, "the class of a ledger derives from FoldBody");
    return false;
}

static bool fold_begin(Folding *folding, PyObject *ledger)
{
    memset(folding, 0, sizeof *folding);
    folding->fold = (Fold *)ledger;
    folding->fields = PyObject_GenericGetDict(ledger, NULL);
    return folding->fields != NULL;
}

void fold_end(Folding *folding)
{
    forget_seen(folding);
    Py_CLEAR(folding->fields);
    Py_CLEAR(folding->seq_object);
}

/* A policy or a listener that gets an event and uses the ledger while it runs. */
static PyObject *refuse_amid_event(void)
{
    return PyErr_Format(PyExc_RuntimeError, "the ledger folds an event; use it when the event is folded");
}

/* As `Ledger.apply` in Python, to which it leaves what is not folded here. */
PyObject *fold_next(Folding *folding, PyObject *event)
{
    folding->event = event;
    folding->kind = kind_of(event);
    folding->ended = NULL;
    if (folding->fold->folds)
        return refuse_amid_event();
    if (python.reference == NULL)
        return PyErr_Format(PyExc_RuntimeError, "the native body is not connected; import kvsm.core.ledger first");
    Py_XDECREF(folding->seq_object);
    folding->seq_object = value_of(folding, N_seq);
    const Verdict verdict = fold_here(folding);
    PyObject *ended = folding->ended;
    if (verdict == REFERENCE) {
        PyErr_Clear();
        forget_seen(folding);
        return PyObject_CallFunctionObjArgs(python.reference, (PyObject *)folding->fold, event, NULL);
    }
    if (verdict == FAILED) {
        Py_XDECREF(ended);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_SystemError, "the native body of the fold failed without a reason");
        return NULL;
    }
    if (ended != NULL)
        return ended;
    Py_RETURN_NONE;
}

static PyObject *py_apply(PyObject *self, PyObject *event)
{
    Folding folding;
    PyObject *ended = fold_begin(&folding, self) ? fold_next(&folding, event) : NULL;
    fold_end(&folding);
    return ended;
}

/* apply_all(events): as `Ledger.apply_all` in Python. */
static PyObject *py_apply_all(PyObject *self, PyObject *events)
{
    Folding folding;
    PyObject *iterator = PyObject_GetIter(events), *event;
    if (iterator == NULL)
        return NULL;
    bool done = fold_begin(&folding, self);
    while (done && (event = PyIter_Next(iterator)) != NULL) {
        PyObject *ended = fold_next(&folding, event);
        done = ended != NULL;
        Py_XDECREF(ended);
        Py_DECREF(event);
    }
    fold_end(&folding);
    Py_DECREF(iterator);
    if (!done || PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

bool slots_of(Batch *batch, PyObject *slots)
{
    Py_buffer buffer;
    bool fit = PyTuple_CheckExact(slots);
    if (!fit && PyObject_GetBuffer(slots, &buffer, PyBUF_CONTIG_RO | PyBUF_FORMAT) == 0) {
        fit = is_int64(&buffer);
        PyBuffer_Release(&buffer);
    }
    return fit && batch_read(batch, slots);
}

/* Those of these slots that are in another state than STORED, as a list. */
static PyObject *not_stored(const Words *blocks, const Batch *slots)
{
    PyObject *busy = PyList_New(0);
    for (Py_ssize_t one = 0; busy != NULL && one < slots->count; one++) {
        const int64_t slot = slots->ids[one];
        if (slot < 0 || slot >= blocks->size) {
            PyErr_SetString(PyExc_IndexError, "a slot does not exist");
            Py_CLEAR(busy);
        } else if (state_of(blocks->words[slot]) != BLOCK_STORED) {
            PyObject *number = PyLong_FromLongLong(slot);
            if (number == NULL || PyList_Append(busy, number) < 0)
                Py_CLEAR(busy);
            Py_XDECREF(number);
        }
    }
    return busy;
}

/* not_stored(slots): as `LedgerState.not_stored` in Python. */
static PyObject *py_not_stored(PyObject *self, PyObject *slots)
{
    if (((Fold *)self)->folds)
        return refuse_amid_event();
    Folding folding = {.fold = (Fold *)self};
    Words *blocks = &folding.fold->blocks;
    Batch batch = {0};
    PyObject *busy = NULL;
    folding.fields = PyObject_GenericGetDict(self, NULL);
    if (folding.fields != NULL && see_words(blocks, &BLOCK, field(&folding, N_blocks))) {
        if (slots_of(&batch, slots))
            busy = not_stored(blocks, &batch);
        else
            refuse_slots();
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "the words of the blocks are none that the native body reads");
    batch_clear(&batch);
    fold_end(&folding);
    return busy;
}

/* freeze(): the state as it is now, in parts that are copied while events go on being folded. */
static PyObject *py_freeze(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    if (((Fold *)self)->folds)
        return refuse_amid_event();
    Folding folding = {.fold = (Fold *)self};
    folding.fields = PyObject_GenericGetDict(self, NULL);
    PyObject *parts = folding.fields != NULL && see_blocks(&folding) ? freeze(&folding) : NULL;
    fold_end(&folding);
    if (parts == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return parts;
}

static void fold_dealloc(PyObject *self)
{
    Fold *fold = (Fold *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    see_words(&fold->blocks, &BLOCK, NULL);
    see_words(&fold->leases, &LEASE, NULL);
    see_generation(fold, NULL);
    Py_CLEAR(fold->frozen);
    free(fold->mark);
    free(fold->scratch);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"apply", py_apply, METH_O, "As `Ledger.apply` in Python."},
    {"apply_all", py_apply_all, METH_O, "As `Ledger.apply_all` in Python."},
    {"not_stored", py_not_stored, METH_O, "Those of these slots that are in another state than STORED."},
    {"freeze", py_freeze, METH_NOARGS,
     "The parts of the state as it is now (`FrozenPart`): slots, device blocks, offers, free queue, and the\n"
     "eviction order of LRU. They are copied while events are folded. Parts that were made before and are not\n"
     "whole are dropped. None: it holds what this body does not know."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native part of a ledger."},
    {Py_tp_dealloc, fold_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec fold_spec = {
    .name = "kvsm.core.native._body.FoldBody",
    .basicsize = sizeof(Fold),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
