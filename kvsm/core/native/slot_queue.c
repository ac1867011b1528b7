/* A first-in-first-out queue of slots (kvsm/core/policies/slot_queue.py): a row, and behind it a linked list.

   The row is in the order of slot numbers, so it is a bit for each slot, and one pass over the bits fills or empties
   the queue. Appended slots go to the list. Its links are arrays with an entry for each slot, so the list never has
   to be compacted or enlarged. */

#include "body.h"

static bool is_set(const uint64_t *bits, int32_t slot) { return bits[slot / GROUP] >> slot % GROUP & 1; }

static void set_bit(uint64_t *bits, int32_t slot) { bits[slot / GROUP] |= (uint64_t)1 << slot % GROUP; }

static void clear_bit(uint64_t *bits, int32_t slot) { bits[slot / GROUP] &= ~((uint64_t)1 << slot % GROUP); }

static void link_to(SlotQueue *queue, int32_t node, int32_t next) { queue->next[node] = next; }

static bool queue_holds(const SlotQueue *queue, int32_t slot)
{
    return is_set(queue->listed, slot) || is_set(queue->row, slot);
}

/* Take a slot out of the row or the list. Returns whether it was there. */
static bool take_out(SlotQueue *queue, int32_t slot)
{
    if (is_set(queue->listed, slot)) {
        const int32_t next = queue->next[slot + 1], before = queue->before[slot + 1];
        clear_bit(queue->listed, slot);
        if (queue->frozen != NULL)
            keep_link(queue, before);
        link_to(queue, before, next);
        queue->before[next] = before;
        return true;
    }
    if (!is_set(queue->row, slot))
        return false;
    clear_bit(queue->row, slot);
    while (queue->row_from < queue->groups && queue->row[queue->row_from] == 0)
        queue->row_from++;
    return true;
}

/* Link a slot that stands nowhere before a node. Slot s is node s + 1. Node 0 is the head and the tail. */
static void link_before(SlotQueue *queue, int32_t slot, int32_t behind)
{
    const int32_t node = slot + 1, last = queue->before[behind];
    if (queue->frozen != NULL)
        keep_link(queue, node);
    if (behind != 0 && queue->frozen != NULL) /* it may have been dropped just now */
        keep_link(queue, last);
    set_bit(queue->listed, slot);
    link_to(queue, last, node);
    link_to(queue, node, behind);
    queue->before[node] = last;
    queue->before[behind] = node;
}

void queue_append(SlotQueue *queue, int32_t slot)
{
    queue->size += !take_out(queue, slot);
    link_before(queue, slot, 0);
}

/* Put the slots of the row at the front of the list. */
static void list_row(SlotQueue *queue)
{
    int32_t first = queue->next[0];
    for (int32_t group = queue->row_from; group < queue->groups; group++)
        for (uint64_t *left = &queue->row[group]; *left != 0; *left &= *left - 1)
            link_before(queue, group * GROUP + __builtin_ctzll(*left), first);
    queue->row_from = queue->groups;
}

int32_t queue_place(SlotQueue *queue, int64_t slot)
{
    if (slot < 0 || slot >= queue->capacity || !queue_holds(queue, (int32_t)slot))
        return 0;
    if (is_set(queue->row, (int32_t)slot))
        list_row(queue);
    return (int32_t)slot + 1;
}

void queue_insert(SlotQueue *queue, int32_t slot, int32_t place)
{
    queue->size += !take_out(queue, slot);
    link_before(queue, slot, place);
}


void queue_remove(SlotQueue *queue, int32_t slot) { queue->size -= take_out(queue, slot); }

void queue_clear(SlotQueue *queue)
{
    if (queue->row_from < queue->groups)
        memset(queue->row, 0, (size_t)queue->groups * sizeof *queue->row);
    if (queue->next[0] != 0)
        memset(queue->listed, 0, (size_t)queue->groups * sizeof *queue->listed);
    link_to(queue, 0, 0);
    queue->before[0] = 0;
    queue->row_from = queue->groups;
    queue->size = 0;
}

void queue_fill_row(SlotQueue *queue, int32_t group, uint64_t members)
{
    if (members == 0)
        return;
    queue->row[group] = members;
    queue->size += members == ~(uint64_t)0 ? GROUP : __builtin_popcountll(members);
    if (group < queue->row_from)
        queue->row_from = group;
}

/* The slot behind this one, or the first one for -1; -1: there is none. */
int32_t queue_behind(const SlotQueue *queue, int32_t slot)
{
    if (slot >= 0 && is_set(queue->listed, slot))
        return queue->next[slot + 1] - 1;
    if (slot >= 0 && !is_set(queue->row, slot))
        return -1;
    int32_t group = slot < 0 ? queue->row_from : slot / GROUP;
    uint64_t left = slot < 0 ? ~(uint64_t)0 : ~(uint64_t)1 << slot % GROUP;
    for (; group < queue->groups; group++, left = ~(uint64_t)0)
        if ((queue->row[group] & left) != 0)
            return group * GROUP + __builtin_ctzll(queue->row[group] & left);
    return queue->next[0] - 1;
}

int64_t queue_first(const SlotQueue *queue) { return queue_behind(queue, -1); }

/* --------------------------------------------------------------------------------------- for Python */

static void free_links(PyObject *links) { free(PyCapsule_GetPointer(links, NULL)); }

static PyObject *queue_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"capacity", NULL};
    Py_ssize_t capacity;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n", names, &capacity))
        return NULL;
    if (capacity < 0 || capacity >= INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "a queue of %zd slots: it must be from 0 to 2**31 - 2", capacity);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    SlotQueue *queue = (SlotQueue *)allocate(type, 0);
    if (queue == NULL)
        return NULL;
    queue->capacity = (int32_t)capacity;
    queue->groups = queue->row_from = (int32_t)((capacity + GROUP - 1) / GROUP);
    queue->row = calloc((size_t)queue->groups + 1, sizeof *queue->row);
    queue->listed = calloc((size_t)queue->groups + 1, sizeof *queue->listed);
    queue->next = malloc(((size_t)capacity + 1) * sizeof *queue->next);
    queue->before = malloc(((size_t)capacity + 1) * sizeof *queue->before);
    queue->links = queue->next == NULL ? NULL : PyCapsule_New(queue->next, NULL, free_links);
    if (queue->row == NULL || queue->listed == NULL || queue->links == NULL || queue->before == NULL) {
        if (queue->links == NULL)
            free(queue->next);
        Py_DECREF(queue);
        return PyErr_NoMemory();
    }
    queue->next[0] = queue->before[0] = 0;
    return (PyObject *)queue;
}

static void queue_dealloc(PyObject *self)
{
    SlotQueue *queue = (SlotQueue *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_CLEAR(queue->links);
    Py_CLEAR(queue->frozen);
    free(queue->row);
    free(queue->listed);
    free(queue->before);
    release(self);
    Py_DECREF(type);
}

/* The slot that a Python int names, or -1 with an `IndexError`. */
static int32_t slot_in(const SlotQueue *queue, PyObject *number)
{
    const long long slot = PyLong_AsLongLong(number);
    if (slot == -1 && PyErr_Occurred())
        return -1;
    if (slot < 0 || slot >= queue->capacity) {
        PyErr_Format(PyExc_IndexError, "slot %lld is none of the %d", slot, queue->capacity);
        return -1;
    }
    return (int32_t)slot;
}

/* Slots of a batch, all read before the first is used: so a batch that is refused changes nothing, and no code of
   Python runs while the queue is changed. */
typedef struct {
    Py_ssize_t count;
    int32_t *slots, few[SMALL];
} Read;

static bool read_begin(Read *read, Py_ssize_t count)
{
    read->count = count;
    read->slots = count <= SMALL ? read->few : malloc((size_t)count * sizeof *read->slots);
    return read->slots != NULL || PyErr_NoMemory() != NULL;
}

static void read_end(Read *read)
{
    if (read->slots != read->few)
        free(read->slots);
}

/* The slots of a tuple of any length. */
static bool read_tuple(const SlotQueue *queue, PyObject *slots, Read *read)
{
    bool all = read_begin(read, PyTuple_Size(slots));
    for (Py_ssize_t one = 0; all && one < read->count; one++)
        all = (read->slots[one] = slot_in(queue, PyTuple_GetItem(slots, one))) >= 0;
    return all;
}

/* The slots of an array of int64 with any stride. */
static bool read_array(const SlotQueue *queue, PyObject *slots, Read *read)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(slots, &buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) < 0)
        return false;
    bool all = buffer.ndim == 1 && is_int64(&buffer);
    if (!all)
        PyErr_SetString(PyExc_TypeError, "slots are a tuple, or an aligned array of int64");
    all = all && read_begin(read, buffer.shape[0]);
    for (Py_ssize_t one = 0; all && one < read->count; one++) {
        const int64_t slot = *(const int64_t *)((const char *)buffer.buf + one * buffer.strides[0]);
        all = slot >= 0 && slot < queue->capacity;
        if (!all)
            PyErr_Format(PyExc_IndexError, "slot %lld is none of the %d", (long long)slot, queue->capacity);
        read->slots[one] = (int32_t)slot;
    }
    PyBuffer_Release(&buffer);
    return all;
}

typedef bool (*Visit)(SlotQueue *queue, int32_t slot, void *more);

/* Visit all slots of a batch, or none: then an error is set. */
static bool each_slot(SlotQueue *queue, PyObject *slots, Visit visit, void *more)
{
    Read read = {.slots = read.few};
    bool all = PyTuple_Check(slots) ? read_tuple(queue, slots, &read) : read_array(queue, slots, &read);
    for (Py_ssize_t one = 0; all && one < read.count; one++)
        all = visit(queue, read.slots[one], more);
    read_end(&read);
    return all;
}

static bool visit_append(SlotQueue *queue, int32_t slot, void *more)
{
    (void)more;
    queue_append(queue, slot);
    return true;
}

static bool visit_insert(SlotQueue *queue, int32_t slot, void *more)
{
    queue_insert(queue, slot, *(const int32_t *)more);
    return true;
}

static bool visit_differs(SlotQueue *queue, int32_t slot, void *more)
{
    (void)queue;
    int32_t *before = more;
    if (slot + 1 == *before)
        *before = 0;
    return true;
}

static bool visit_remove(SlotQueue *queue, int32_t slot, void *more)
{
    (void)more;
    queue_remove(queue, slot);
    return true;
}

static bool visit_row(SlotQueue *queue, int32_t slot, void *more)
{
    bool *emptied = more;
    if (!*emptied)
        queue_clear(queue);
    *emptied = true;
    const int32_t group = slot / GROUP;
    queue->size += !is_set(queue->row, slot);
    set_bit(queue->row, slot);
    if (group < queue->row_from)
        queue->row_from = group;
    return true;
}

static bool visit_which(SlotQueue *queue, int32_t slot, void *more)
{
    return PyList_Append(more, queue_holds(queue, slot) ? Py_True : Py_False) == 0;
}

static PyObject *py_append(PyObject *self, PyObject *slots)
{
    if (!each_slot((SlotQueue *)self, slots, visit_append, NULL))
        return NULL;
    Py_RETURN_NONE;
}

/* insert(slots, before): a place of 0 is the tail. */
static PyObject *py_insert(PyObject *self, PyObject *arguments)
{
    SlotQueue *queue = (SlotQueue *)self;
    PyObject *slots, *before;
    int32_t place = 0;
    if (!PyArg_ParseTuple(arguments, "OO", &slots, &before))
        return NULL;
    if (before != Py_None) {
        const int32_t slot = slot_in(queue, before);
        if (slot < 0)
            return NULL;
        place = queue_place(queue, slot);
        if (place != 0 && !each_slot(queue, slots, visit_differs, &place))
            return NULL;
    }
    if (!each_slot(queue, slots, visit_insert, &place))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_remove(PyObject *self, PyObject *slots)
{
    if (!each_slot((SlotQueue *)self, slots, visit_remove, NULL))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_refill(PyObject *self, PyObject *slots)
{
    bool emptied = false;
    if (!each_slot((SlotQueue *)self, slots, visit_row, &emptied))
        return NULL;
    if (!emptied)
        queue_clear((SlotQueue *)self);
    Py_RETURN_NONE;
}

static PyObject *py_which(PyObject *self, PyObject *slots)
{
    PyObject *inside = PyList_New(0);
    if (inside != NULL && !each_slot((SlotQueue *)self, slots, visit_which, inside))
        Py_CLEAR(inside);
    return inside;
}

/* following(slot, count): up to `count` slots behind `slot` as bytes of int64; from the head for -1. */
static PyObject *py_following(PyObject *self, PyObject *arguments)
{
    SlotQueue *queue = (SlotQueue *)self;
    Py_ssize_t slot, count;
    if (!PyArg_ParseTuple(arguments, "nn", &slot, &count))
        return NULL;
    if (slot < -1 || slot >= queue->capacity)
        return PyErr_Format(PyExc_IndexError, "slot %zd is none of the %d", slot, queue->capacity);
    if (count < 0 || count > queue->size)
        count = (Py_ssize_t)queue->size;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (bytes == NULL)
        return NULL;
    char *place = PyBytes_AsString(bytes);
    Py_ssize_t found = 0;
    int32_t behind = queue_behind(queue, (int32_t)slot);
    for (; behind >= 0 && found < count; behind = queue_behind(queue, behind)) {
        const int64_t next = behind;
        memcpy(place + found++ * sizeof next, &next, sizeof next);
    }
    if (found == count)
        return bytes;
    PyObject *shorter = PyBytes_FromStringAndSize(place, found * (Py_ssize_t)sizeof(int64_t));
    Py_DECREF(bytes);
    return shorter;
}

/* first(count, protected): up to `count` slots from the head that are not protected, in the ledger's form. */
static PyObject *py_first(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"count", "protected", NULL};
    SlotQueue *queue = (SlotQueue *)self;
    Py_ssize_t count, found = 0;
    PyObject *barred = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|O", names, &count, &barred))
        return NULL;
    const Py_ssize_t asked = count;
    const bool bars = barred != NULL && PyObject_Size(barred) > 0;
    if (count > queue->size)
        count = (Py_ssize_t)queue->size;
    if (count < 0)
        count = 0;
    if (PyErr_Occurred())
        return NULL;
    int64_t *slots = malloc((size_t)(count + 1) * sizeof *slots);
    if (slots == NULL)
        return PyErr_NoMemory();
    int64_t left = queue->size; /* `protected` may change the queue: then the walk ends here */
    for (int32_t slot = queue_behind(queue, -1); slot >= 0 && found < count && left-- > 0; slot = queue_behind(queue, slot)) {
        int inside = 0;
        if (bars) {
            PyObject *number = PyLong_FromLong(slot);
            inside = number == NULL ? -1 : PySequence_Contains(barred, number);
            Py_XDECREF(number);
        }
        if (inside < 0) {
            free(slots);
            return NULL;
        }
        if (!inside)
            slots[found++] = slot;
    }
    PyObject *ids = asked > SMALL && queue->size > 0 ? array_object(slots, found) : ids_object(slots, found);
    free(slots);
    return ids;
}

static PyObject *py_frozen_part(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    return freeze_queue((SlotQueue *)self);
}

static Py_ssize_t py_length(PyObject *self) { return (Py_ssize_t)((SlotQueue *)self)->size; }

static int py_contains(PyObject *self, PyObject *number)
{
    const int32_t slot = slot_in((SlotQueue *)self, number);
    return slot < 0 ? -1 : queue_holds((SlotQueue *)self, slot);
}

static PyObject *py_capacity(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(((SlotQueue *)self)->capacity);
}

static PyMethodDef methods[] = {
    {"append", py_append, METH_O, "Put distinct slots at the tail, in the order given."},
    {"insert", py_insert, METH_VARARGS, "Put distinct slots right before another one, in the order given."},
    {"remove", py_remove, METH_O, "Take out all of `slots` that are in the queue."},
    {"refill", py_refill, METH_O, "Hold these slots alone, which are in the order of their numbers."},
    {"which", py_which, METH_O, "For each of `slots`, whether it is in the queue."},
    {"first", (PyCFunction)(void (*)(void))py_first, METH_VARARGS | METH_KEYWORDS,
     "Up to `count` slots from the head that are not `protected`; changes nothing."},
    {"following", py_following, METH_VARARGS, "Up to `count` slots behind `slot`; from the head for -1."},
    {"frozen_part", py_frozen_part, METH_NOARGS, "The order as it is now, copied while the queue changes."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"capacity", py_capacity, NULL, "Slots from 0 to this, exclusive.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Distinct slots from 0 to `capacity` - 1, oldest first."},
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {Py_sq_length, py_length},
    {Py_sq_contains, py_contains},
    {0, NULL},
};

PyType_Spec slot_queue_spec = {
    .name = "kvsm.core.native._body.QueueBody",
    .basicsize = sizeof(SlotQueue),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
