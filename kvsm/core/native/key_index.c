/* The index (kvsm/core/ledger/key_index.py): key -> slot, over the keys of the slots.

   A hash table with open addressing, at least twice as large as the pool. It never grows, so no insertion ever
   waits for a rebuild. A place has the slot and a part of the key's hash; the key itself is in the list `key_of`.
   Removal leaves no tombstone: the entries behind the removed one move up.

   Clearing the table only counts up `clears`: each page is emptied at its first use after that. */

#include "body.h"

#define PAGE 64 /* places; a table has one page or more */
#define MOST_SLOTS (INT32_MAX - 1)

static inline uint32_t part_of(Py_hash_t hash) { return (uint32_t)((uint64_t)hash ^ (uint64_t)hash >> 32); }

static inline Place *at(const KeyIndex *index, uint32_t place)
{
    uint64_t *clean = &index->clean[place / PAGE];
    if (*clean != index->clears) {
        *clean = index->clears;
        memset(&index->places[place / PAGE * PAGE], 0, PAGE * sizeof *index->places);
    }
    return &index->places[place];
}

static int64_t keys_are_others(void)
{
    PyErr_SetString(PyExc_RuntimeError, "the list of an index's keys was changed without the index");
    return -1;
}

/* A key as plain bytes; owned. NULL without an error: it is no bytes. */
static PyObject *plain(PyObject *key)
{
    if (PyBytes_CheckExact(key)) {
        Py_INCREF(key);
        return key;
    }
    return PyBytes_Check(key) ? PyBytes_FromStringAndSize(PyBytes_AsString(key), PyBytes_Size(key)) : NULL;
}

/* The place of this key, which is plain bytes, or the free place where it would be; -1 with an error set. There is a
   free place: a table has twice as many as the index may have entries. */
static int64_t place_of(const KeyIndex *index, PyObject *key, uint32_t part)
{
    uint32_t place = part & index->mask;
    for (const Place *here; (here = at(index, place))->slot != 0; place = (place + 1) & index->mask) {
        if (here->part != part)
            continue;
        PyObject *other = PyList_GetItem(index->key_of, (Py_ssize_t)here->slot - 1);
        if (other == NULL)
            return keys_are_others();
        const int same = other == key               ? 1
                         : PyBytes_CheckExact(other) ? PyObject_RichCompareBool(other, key, Py_EQ)
                                                     : 0;
        if (same < 0)
            return -1;
        if (same)
            break;
    }
    return place;
}

int64_t index_find(const KeyIndex *index, PyObject *key)
{
    PyObject *bytes = plain(key);
    if (bytes == NULL)
        return PyErr_Occurred() ? -2 : -1;
    const int64_t place = place_of(index, bytes, part_of(PyObject_Hash(bytes)));
    Py_DECREF(bytes);
    return place < 0 ? -2 : (int64_t)at(index, (uint32_t)place)->slot - 1;
}

/* Name `slot` by its key, plain bytes, which is in `key_of`, or will be. false: an error is set. */
static bool name_slot(KeyIndex *index, PyObject *key, int64_t slot)
{
    const uint32_t part = part_of(PyObject_Hash(key));
    const int64_t place = place_of(index, key, part);
    if (place < 0)
        return false;
    Place *here = at(index, (uint32_t)place);
    if (here->slot == 0 && index->size >= index->capacity)
        return keys_are_others() == 0;
    index->size += here->slot == 0;
    *here = (Place){(uint32_t)slot + 1, part};
    return true;
}

/* Forget the entry of a place, and let those behind it move up. */
static void forget_place(KeyIndex *index, uint32_t gap)
{
    const uint32_t mask = index->mask;
    const Place *here;
    for (uint32_t next = (gap + 1) & mask; (here = at(index, next))->slot != 0; next = (next + 1) & mask) {
        const uint32_t home = here->part & mask;
        if (((next - home) & mask) >= ((next - gap) & mask)) {
            *at(index, gap) = *here;
            gap = next;
        }
    }
    *at(index, gap) = (Place){0, 0};
    index->size--;
}

/* Give a slot its key in the list. Returns the key that it had; owned. NULL: an error is set. */
static PyObject *replace_key(KeyIndex *index, int64_t slot, PyObject *key)
{
    PyObject *before = PyList_GetItem(index->key_of, (Py_ssize_t)slot);
    if (before == NULL)
        return NULL;
    Py_INCREF(before);
    Py_INCREF(key);
    if (PyList_SetItem(index->key_of, (Py_ssize_t)slot, key) < 0)
        Py_CLEAR(before);
    return before;
}

/* Let the index name these slots by these keys, if all keys are new and distinct. Changes `key_of`, too. */
Verdict index_enter(KeyIndex *index, PyObject *keys, const Batch *slots)
{
    PyObject **before = malloc((size_t)(slots->count + 1) * sizeof *before);
    Verdict verdict = FOLDED;
    Py_ssize_t entered = 0;
    if (before == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    for (; verdict == FOLDED && entered < slots->count; entered++) {
        PyObject *key = PyTuple_GetItem(keys, entered);
        if (!PyBytes_CheckExact(key) || index_find(index, key) != -1) {
            verdict = REFERENCE;
            break;
        }
        /* Its key first, because the next key may be the same. */
        before[entered] = replace_key(index, slots->ids[entered], key);
        if (before[entered] == NULL || !name_slot(index, key, slots->ids[entered]))
            verdict = FAILED;
    }
    while (entered-- > 0) {
        if (verdict == REFERENCE) { /* as if nothing had been entered */
            Py_INCREF(before[entered]);
            if (index_remove(index, PyTuple_GetItem(keys, entered)) < 0 ||
                PyList_SetItem(index->key_of, (Py_ssize_t)slots->ids[entered], before[entered]) < 0)
                verdict = FAILED;
        }
        Py_XDECREF(before[entered]);
    }
    free(before);
    return verdict;
}

/* 1: removed. 0: it was not there. -1: an error is set. */
int index_remove(KeyIndex *index, PyObject *key)
{
    PyObject *bytes = plain(key);
    if (bytes == NULL)
        return PyErr_Occurred() ? -1 : 0;
    const int64_t place = place_of(index, bytes, part_of(PyObject_Hash(bytes)));
    Py_DECREF(bytes);
    if (place < 0)
        return -1;
    if (at(index, (uint32_t)place)->slot == 0)
        return 0;
    forget_place(index, (uint32_t)place);
    return 1;
}

void index_clear(KeyIndex *index)
{
    index->clears++;
    index->size = 0;
}

/* Bring the place of a key into the cache. false: the key is no plain bytes. */
static bool prefetch_place(const KeyIndex *index, PyObject *key)
{
    if (!PyBytes_CheckExact(key))
        return false;
    const uint32_t place = part_of(PyObject_Hash(key)) & index->mask;
    __builtin_prefetch(&index->clean[place / PAGE]);
    __builtin_prefetch(&index->places[place]);
    return true;
}

/* Bring the places of these keys into the cache before they are read one after the other. */
void index_prefetch(const KeyIndex *index, PyObject *keys, Py_ssize_t count)
{
    for (Py_ssize_t one = 0; one < count; one++)
        if (!prefetch_place(index, PyTuple_Check(keys) ? PyTuple_GetItem(keys, one) : PyList_GetItem(keys, one)))
            return;
}

/* --------------------------------------------------------------------------------------- for Python */

static PyObject *index_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"key_of", "capacity", NULL};
    PyObject *key_of;
    Py_ssize_t slots;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!n", names, &PyList_Type, &key_of, &slots))
        return NULL;
    if (slots < 0 || slots > MOST_SLOTS)
        return PyErr_Format(PyExc_ValueError, "an index of %zd slots: it must be from 0 to 2**31 - 2", slots);
    uint64_t places = PAGE;
    while (places < 2 * (uint64_t)slots)
        places *= 2;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    KeyIndex *index = (KeyIndex *)allocate(type, 0);
    if (index == NULL)
        return NULL;
    Py_INCREF(key_of);
    index->key_of = key_of;
    index->capacity = (int64_t)slots;
    index->mask = (uint32_t)(places - 1);
    index->places = calloc(places, sizeof *index->places);
    index->clean = calloc(places / PAGE, sizeof *index->clean);
    if (index->places == NULL || index->clean == NULL) {
        Py_DECREF(index);
        return PyErr_NoMemory();
    }
    return (PyObject *)index;
}

static void index_dealloc(PyObject *self)
{
    KeyIndex *index = (KeyIndex *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(index->places);
    free(index->clean);
    Py_CLEAR(index->key_of);
    release(self);
    Py_DECREF(type);
}

static PyObject *slot_or(const KeyIndex *index, PyObject *key, PyObject *otherwise)
{
    const int64_t slot = index_find(index, key);
    if (slot >= 0)
        return PyLong_FromLongLong(slot);
    if (slot == -2)
        return NULL;
    Py_XINCREF(otherwise);
    return otherwise;
}

static PyObject *py_get(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count < 1 || count > 2)
        return PyErr_Format(PyExc_TypeError, "get() takes a key and a default; it got %zd arguments", count);
    return slot_or((KeyIndex *)self, arguments[0], count == 2 ? arguments[1] : Py_None);
}

static PyObject *py_getitem(PyObject *self, PyObject *key)
{
    PyObject *slot = slot_or((KeyIndex *)self, key, NULL);
    if (slot == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key);
    return slot;
}

/* Whether the index names the slot by another key than this one. */
static bool is_named(const KeyIndex *index, int64_t slot, PyObject *key)
{
    PyObject *before = PyList_GetItem(index->key_of, (Py_ssize_t)slot);
    const bool is_other =
        before != NULL && PyBytes_CheckExact(before) && PyObject_RichCompareBool(before, key, Py_EQ) == 0;
    return is_other && index_find(index, before) == slot;
}

/* index[key] = number. false: an error is set, and nothing is changed. */
static bool set_slot(KeyIndex *index, PyObject *given, PyObject *number)
{
    const Py_ssize_t known = PyList_Size(index->key_of), slots = known < index->capacity ? known : index->capacity;
    int64_t slot = number == Py_True; /* as a list takes it */
    if ((!PyBool_Check(number) && !read_number(number, &slot)) || slot >= slots) {
        PyErr_Format(PyExc_IndexError, "slot %R is none of the %zd", number, slots);
        return false;
    }
    PyObject *key = plain(given);
    if (key == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a key is bytes");
        return false;
    }
    if (is_named(index, slot, key))
        PyErr_Format(PyExc_ValueError, "slot %lld has another key; delete that first", (long long)slot);
    if (!PyErr_Occurred() && name_slot(index, key, slot))
        return PyList_SetItem(index->key_of, (Py_ssize_t)slot, key) == 0;
    Py_DECREF(key);
    return false;
}

static int py_setitem(PyObject *self, PyObject *key, PyObject *number)
{
    KeyIndex *index = (KeyIndex *)self;
    if (number == NULL) {
        const int removed = index_remove(index, key);
        if (removed == 0)
            PyErr_SetObject(PyExc_KeyError, key);
        return removed == 1 ? 0 : -1;
    }
    return set_slot(index, key, number) ? 0 : -1;
}

static int py_contains(PyObject *self, PyObject *key)
{
    const int64_t slot = index_find((KeyIndex *)self, key);
    return slot == -2 ? -1 : slot >= 0;
}

static Py_ssize_t py_length(PyObject *self) { return (Py_ssize_t)((KeyIndex *)self)->size; }

/* find(keys): the slot of each key of a list or tuple, None for a key that is not there. */
static PyObject *py_find(PyObject *self, PyObject *keys)
{
    const KeyIndex *index = (KeyIndex *)self;
    if (!PyTuple_Check(keys) && !PyList_Check(keys))
        return PyErr_Format(PyExc_TypeError, "keys are a list or a tuple");
    const Py_ssize_t count = PyTuple_Check(keys) ? PyTuple_Size(keys) : PyList_Size(keys);
    PyObject *slots = PyList_New(count);
    index_prefetch(index, keys, count);
    for (Py_ssize_t one = 0; slots != NULL && one < count; one++) {
        PyObject *key = PyTuple_Check(keys) ? PyTuple_GetItem(keys, one) : PyList_GetItem(keys, one);
        PyObject *slot = key == NULL ? NULL : slot_or(index, key, Py_None);
        if (slot == NULL)
            Py_CLEAR(slots);
        else
            PyList_SetItem(slots, one, slot);
    }
    return slots;
}

#define PIECE 16 /* as in kvsm/core/scheduler/hits.py: so both bodies look at the same hashes of a prompt */

/* The key of a chunk: the hash that ends it, and the suffix; owned. NULL without an error: Python makes it, or
   refuses it. */
static PyObject *chunk_key(PyObject *hashes, Py_ssize_t place, PyObject *suffix)
{
    PyObject *hash = PyList_GetItem(hashes, place);
    if (hash == NULL || !PyBytes_CheckExact(hash))
        return NULL;
    const Py_ssize_t size = PyBytes_Size(hash), more = PyBytes_Size(suffix);
    PyObject *key = PyBytes_FromStringAndSize(NULL, size + more);
    if (key != NULL) {
        memcpy(PyBytes_AsString(key), PyBytes_AsString(hash), (size_t)size);
        memcpy(PyBytes_AsString(key) + size, PyBytes_AsString(suffix), (size_t)more);
    }
    return key;
}

/* Look for `count` chunks whose first hash is at `place`. Returns how many are there, up to one that is not;
   -1: Python makes the keys, or an error is set. */
static Py_ssize_t find_chunks(const KeyIndex *index, PyObject *hashes, Py_ssize_t place, Py_ssize_t stride,
                              PyObject *suffix, Py_ssize_t count, int64_t *slots)
{
    PyObject *keys[PIECE];
    Py_ssize_t made = 0, found = 0;
    bool readable = true;
    for (; readable && made < count; made += readable) {
        keys[made] = chunk_key(hashes, place + made * stride, suffix);
        readable = keys[made] != NULL && prefetch_place(index, keys[made]);
        if (!readable)
            Py_XDECREF(keys[made]);
    }
    while (readable && found < count && (slots[found] = index_find(index, keys[found])) >= 0)
        found++;
    if (readable && found < count && slots[found] == -2)
        readable = false;
    while (made-- > 0)
        Py_DECREF(keys[made]);
    return readable ? found : -1;
}

/* find_prefix(hashes, stride, suffix, first, last): the slots of these chunks, in the ledger's form, up to the
   first chunk whose key is not there. Chunk n ends with hash number (n + 1) * stride - 1. None: Python makes the
   keys. */
static PyObject *py_find_prefix(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 5 || !PyList_CheckExact(arguments[0]) || !PyBytes_CheckExact(arguments[2]))
        Py_RETURN_NONE;
    PyObject *hashes = arguments[0], *suffix = arguments[2];
    int64_t stride, first, last;
    if (!read_number(arguments[1], &stride) || !read_number(arguments[3], &first) ||
        !read_number(arguments[4], &last) || stride < 1 || last > PyList_Size(hashes) / stride || first > last)
        Py_RETURN_NONE;
    int64_t *slots = malloc((size_t)(last - first + 1) * sizeof *slots);
    if (slots == NULL)
        return PyErr_NoMemory();
    Py_ssize_t found = 0, more = 1; /* most prompts that miss do so at once */
    for (Py_ssize_t asked = 0; found == asked && first + found < last;) {
        const Py_ssize_t left = (Py_ssize_t)(last - first) - found, count = more < left ? more : left;
        const Py_ssize_t here = find_chunks((KeyIndex *)self, hashes, (Py_ssize_t)((first + found + 1) * stride - 1),
                                            (Py_ssize_t)stride, suffix, count, slots + found);
        if (here < 0) {
            free(slots);
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_NONE;
        }
        asked += count;
        found += here;
        more = PIECE;
    }
    PyObject *ids = ids_object(slots, found);
    free(slots);
    return ids;
}

/* keys_by_slot(): all keys, in the order of their slots. */
static PyObject *py_keys_by_slot(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    const KeyIndex *index = (KeyIndex *)self;
    char *named = calloc((size_t)index->capacity + 1, 1);
    PyObject *found = named == NULL ? PyErr_NoMemory() : PyList_New(0);
    for (uint64_t place = 0; found != NULL && place <= index->mask; place++)
        if (at(index, (uint32_t)place)->slot != 0)
            named[at(index, (uint32_t)place)->slot - 1] = 1;
    for (int64_t slot = 0; found != NULL && slot < index->capacity; slot++) {
        if (!named[slot])
            continue;
        PyObject *key = PyList_GetItem(index->key_of, (Py_ssize_t)slot);
        if (key == NULL)
            keys_are_others();
        if (key == NULL || PyList_Append(found, key) < 0)
            Py_CLEAR(found);
    }
    free(named);
    /* A key that was changed in the list names no slot. */
    if (found != NULL && PyList_Size(found) != index->size)
        keys_are_others();
    PyObject *keys = PyErr_Occurred() ? NULL : PyList_AsTuple(found);
    Py_XDECREF(found);
    return keys;
}

/* keys_of(slots): the keys of these slots' latest lives, as a tuple. */
static PyObject *py_keys_of(PyObject *self, PyObject *ids)
{
    const KeyIndex *index = (KeyIndex *)self;
    const bool is_tuple = PyTuple_CheckExact(ids); /* of any length, as Python takes it */
    Batch slots = {0};
    if (!is_tuple && !batch_read(&slots, ids))
        return refuse_slots();
    const Py_ssize_t count = is_tuple ? PyTuple_Size(ids) : slots.count;
    PyObject *keys = PyTuple_New(count);
    for (Py_ssize_t one = 0; keys != NULL && one < count; one++) {
        const int64_t slot = is_tuple ? PyLong_AsLongLong(PyTuple_GetItem(ids, one)) : slots.ids[one];
        PyObject *key = slot == -1 && PyErr_Occurred() ? NULL : PyList_GetItem(index->key_of, (Py_ssize_t)slot);
        if (key == NULL)
            Py_CLEAR(keys);
        else {
            Py_INCREF(key);
            PyTuple_SetItem(keys, one, key);
        }
    }
    batch_clear(&slots);
    return keys;
}

static PyObject *py_clear(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    index_clear((KeyIndex *)self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"get", (PyCFunction)(void (*)(void))py_get, METH_FASTCALL, "The slot of a key, or the default."},
    {"find", py_find, METH_O, "The slot of each key; None for a key that is not there."},
    {"find_prefix", (PyCFunction)(void (*)(void))py_find_prefix, METH_FASTCALL,
     "The slots of chunks, up to the first whose key is not there; None: Python makes the keys."},
    {"keys_by_slot", py_keys_by_slot, METH_NOARGS, "All keys, in the order of their slots."},
    {"keys_of", py_keys_of, METH_O, "The keys of these slots' latest lives."},
    {"clear", py_clear, METH_NOARGS, "Forget all entries."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Key -> slot, over the list of the slots' keys. It does not grow."},
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, methods},
    {Py_mp_length, py_length},
    {Py_mp_subscript, py_getitem},
    {Py_mp_ass_subscript, py_setitem},
    {Py_sq_contains, py_contains},
    {0, NULL},
};

PyType_Spec key_index_spec = {
    .name = "kvsm.core.native._body.IndexBody",
    .basicsize = sizeof(KeyIndex),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
