/* The parts of a world as bytes, and back (kvsm/check/worlds/saving.py).

   Does what `pickle` does, for the few kinds of objects in a decision state, mostly without running Python code. A
   mutable object is written once, and later by its number: so one object in the world is one object in the copy. A
   world with an object of another kind is left to Python. */

#include "body.h"

enum { NONE, TRUE, FALSE, INT, FLOAT, BYTES, TEXT, AGAIN, TUPLE, LIST, DICT, SET, INSTANCE, MADE, SHORT = 0x80 };

/* Object -> number. To forget all of them is to count. */
typedef struct {
    struct Numbered {
        const void *object;
        uint64_t life;
        uint32_t number;
    } *places;
    uint64_t life;
    uint32_t mask, used;
} Numbers;

typedef struct {
    PyObject_HEAD
    PyObject *parts;     /* of each part: (class, its fields in a blank world, the names of those that are saved) */
    PyObject *kinds;     /* of each class: (class, take, make); see `pack_known` and `made_of` */
    PyObject *constants; /* objects that are the same in each copy */
    Numbers constant_numbers, kind_numbers, seen;
    PyObject *taken; /* what was taken of objects, alive until all is written: no other object may get its place */
    char *memory;    /* what was written */
    Py_ssize_t room, used;
    PyObject **read; /* the objects that were read, by number; owned */
    Py_ssize_t read_room, read_used;
    const char *next, *end; /* what is read now */
    bool is_used; /* a pack or an unpack is under way, so its state is incomplete */
} Packer;

static struct Numbered *place_in(const Numbers *numbers, const void *object)
{
    uint32_t place = (uint32_t)((uintptr_t)object >> 4) * 2654435769u & numbers->mask;
    while (numbers->places[place].life == numbers->life && numbers->places[place].object != object)
        place = (place + 1) & numbers->mask;
    return &numbers->places[place];
}

/* The number of an object; -1: it has none. */
static int64_t number_of(const Numbers *numbers, const void *object)
{
    if (numbers->used == 0)
        return -1;
    const struct Numbered *place = place_in(numbers, object);
    return place->life == numbers->life ? (int64_t)place->number : -1;
}

static bool give_number(Numbers *numbers, const void *object, uint32_t number)
{
    if (2 * (numbers->used + 1) > numbers->mask) {
        const Numbers before = *numbers;
        numbers->mask = before.places == NULL ? 255 : 2 * before.mask + 1;
        numbers->places = calloc((size_t)numbers->mask + 1, sizeof *numbers->places);
        if (numbers->places == NULL) {
            *numbers = before;
            return PyErr_NoMemory() != NULL;
        }
        numbers->life = 1;
        for (uint32_t place = 0; before.places != NULL && place <= before.mask; place++)
            if (before.places[place].life == before.life)
                *place_in(numbers, before.places[place].object) =
                    (struct Numbered){before.places[place].object, 1, before.places[place].number};
        free(before.places);
    }
    *place_in(numbers, object) = (struct Numbered){object, numbers->life, number};
    numbers->used++;
    return true;
}

static void forget_numbers(Numbers *numbers)
{
    numbers->used = 0;
    numbers->life++;
}

/* ------------------------------------------------------------------------------------------- to bytes */

static bool put(Packer *packer, const void *data, Py_ssize_t size)
{
    if (packer->used + size > packer->room) {
        const Py_ssize_t room = 2 * (packer->used + size) + 4096;
        char *memory = realloc(packer->memory, (size_t)room);
        if (memory == NULL)
            return PyErr_NoMemory() != NULL;
        packer->memory = memory;
        packer->room = room;
    }
    memcpy(packer->memory + packer->used, data, (size_t)size);
    packer->used += size;
    return true;
}

/* A kind of object, and a number: seven bits a byte, the lowest first. */
static bool put_head(Packer *packer, unsigned char head, uint64_t number)
{
    unsigned char bytes[11] = {head};
    int size = 1;
    for (; number >= 0x80; number >>= 7)
        bytes[size++] = (unsigned char)(number | 0x80);
    bytes[size++] = (unsigned char)number;
    return put(packer, bytes, size);
}

/* The constants have the first numbers. */
static bool give_next_number(Packer *packer, PyObject *one)
{
    return give_number(&packer->seen, one, packer->constant_numbers.used + packer->seen.used);
}

static Verdict pack_one(Packer *packer, PyObject *one);

static PyObject *owned(PyObject *object)
{
    Py_XINCREF(object);
    return object;
}

/* `take` of another object may drop this one from where it was found. NULL: an error is set. */
static Verdict pack_owned(Packer *packer, PyObject *one)
{
    const Verdict verdict = one == NULL ? FAILED : pack_one(packer, one);
    Py_XDECREF(one);
    return verdict;
}

static Verdict pack_int(Packer *packer, PyObject *one)
{
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(one, &overflow);
    if (overflow)
        return REFERENCE;
    const unsigned char head = (unsigned char)(SHORT | (value & 0x7f));
    const uint64_t folded = (uint64_t)value << 1 ^ (uint64_t)(value >> 63);
    return (value >= 0 && value < 0x80 ? put(packer, &head, 1) : put_head(packer, INT, folded)) ? FOLDED : FAILED;
}

static Verdict pack_bytes(Packer *packer, PyObject *one)
{
    Py_ssize_t size;
    char *bytes;
    const bool done = PyBytes_AsStringAndSize(one, &bytes, &size) == 0 && put_head(packer, BYTES, (uint64_t)size) &&
                      put(packer, bytes, size);
    return done ? FOLDED : FAILED;
}

static Verdict pack_text(Packer *packer, PyObject *one)
{
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(one, &size);
    if (text == NULL) { /* it is no text for others */
        PyErr_Clear();
        return REFERENCE;
    }
    return put_head(packer, TEXT, (uint64_t)size) && put(packer, text, size) ? FOLDED : FAILED;
}

/* Let an object live until all is written. Returns it, borrowed; NULL: an error is set. */
static PyObject *held(Packer *packer, PyObject *taken)
{
    const bool done = taken != NULL && PyList_Append(packer->taken, taken) == 0;
    Py_XDECREF(taken);
    return done ? taken : NULL;
}

static Verdict pack_each(Packer *packer, unsigned char head, PyObject *each)
{
    if (head == SET && (each = held(packer, PySequence_List(each))) == NULL)
        return FAILED;
    const bool is_tuple = head == TUPLE;
    const Py_ssize_t size = is_tuple ? PyTuple_Size(each) : PyList_Size(each);
    Verdict verdict = put_head(packer, head, (uint64_t)size) ? FOLDED : FAILED;
    for (Py_ssize_t place = 0; verdict == FOLDED && place < size; place++)
        verdict = pack_owned(packer, owned(is_tuple ? PyTuple_GetItem(each, place) : PyList_GetItem(each, place)));
    return verdict;
}

static Verdict pack_dict(Packer *packer, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    Verdict verdict = put_head(packer, DICT, (uint64_t)PyDict_Size(dict)) ? FOLDED : FAILED;
    const Py_ssize_t size = PyDict_Size(dict);
    Py_ssize_t written = 0;
    for (; verdict == FOLDED && PyDict_Next(dict, &position, &key, &value); written++) {
        Py_INCREF(value);
        verdict = pack_owned(packer, owned(key));
        if (verdict == FOLDED)
            verdict = pack_owned(packer, value);
        else
            Py_DECREF(value);
    }
    if (verdict == FOLDED && (written != size || PyDict_Size(dict) != size)) {
        PyErr_SetString(PyExc_RuntimeError, "a dict was changed while it was saved");
        verdict = FAILED;
    }
    return verdict;
}

/* An object of a known class: its dict of fields if `take` is None, else the tuple that `take` takes of it. */
static Verdict pack_known(Packer *packer, int64_t kind, PyObject *one)
{
    PyObject *take = PyTuple_GetItem(PyTuple_GetItem(packer->kinds, (Py_ssize_t)kind), 1);
    const bool is_instance = take == Py_None;
    PyObject *taken = is_instance ? attribute_of(one, N___dict__) : PyObject_CallFunctionObjArgs(take, one, NULL);
    const bool done = held(packer, taken) != NULL && put_head(packer, is_instance ? INSTANCE : MADE, (uint64_t)kind);
    return done ? pack_one(packer, taken) : FAILED;
}

static Verdict pack_one(Packer *packer, PyObject *one)
{
    const unsigned char head = one == Py_None ? NONE : one == Py_True ? TRUE : FALSE;
    if (one == Py_None || one == Py_True || one == Py_False)
        return put(packer, &head, 1) ? FOLDED : FAILED;
    const PyTypeObject *type = Py_TYPE(one);
    if (type == &PyLong_Type)
        return pack_int(packer, one);
    if (type == &PyTuple_Type)
        return pack_each(packer, TUPLE, one);
    if (type == &PyFloat_Type) {
        const double value = PyFloat_AsDouble(one);
        return put_head(packer, FLOAT, 0) && put(packer, &value, sizeof value) ? FOLDED : FAILED;
    }
    int64_t number = number_of(&packer->constant_numbers, one);
    if (number < 0)
        number = number_of(&packer->seen, one);
    if (number >= 0)
        return put_head(packer, AGAIN, (uint64_t)number) ? FOLDED : FAILED;
    /* From here on it has a number: the same one that `unpack` gives it. */
    if (type == &PyBytes_Type || type == &PyUnicode_Type) {
        const Verdict verdict = type == &PyBytes_Type ? pack_bytes(packer, one) : pack_text(packer, one);
        return verdict != FOLDED || give_next_number(packer, one) ? verdict : FAILED;
    }
    const int64_t kind = number_of(&packer->kind_numbers, type);
    if (kind < 0 && type != &PyList_Type && type != &PyDict_Type && type != &PySet_Type)
        return REFERENCE;
    if (Py_EnterRecursiveCall(" to save a world"))
        return FAILED;
    Verdict verdict = give_next_number(packer, one) ? FOLDED : FAILED;
    if (verdict == FOLDED && kind >= 0)
        verdict = pack_known(packer, kind, one);
    else if (verdict == FOLDED && type == &PyDict_Type)
        verdict = pack_dict(packer, one);
    else if (verdict == FOLDED)
        verdict = pack_each(packer, type == &PyList_Type ? LIST : SET, one);
    Py_LeaveRecursiveCall();
    return verdict;
}

/* What of a part is saved, and behind it the fields that it got later. */
static Verdict pack_part(Packer *packer, PyObject *blank, PyObject *part)
{
    PyObject *fields = held(packer, attribute_of(part, N___dict__)), *made = PyTuple_GetItem(blank, 1);
    PyObject *names = PyTuple_GetItem(blank, 2), *name, *value;
    Verdict verdict = fields != NULL ? FOLDED : FAILED;
    if (fields != NULL && !PyDict_Check(fields)) {
        PyErr_SetString(PyExc_TypeError, "the fields of a part are a dict");
        verdict = FAILED;
    }
    for (Py_ssize_t place = 0; verdict == FOLDED && place < PyTuple_Size(names); place++) {
        name = PyTuple_GetItem(names, place);
        value = PyDict_GetItemWithError(fields, name);
        if (value == NULL && !PyErr_Occurred())
            PyErr_SetObject(PyExc_AttributeError, name);
        verdict = pack_owned(packer, owned(value));
    }
    if (verdict != FOLDED || PyDict_Size(fields) <= PyDict_Size(made))
        return verdict == FOLDED ? pack_one(packer, Py_None) : verdict;
    PyObject *later = held(packer, PyDict_Copy(fields));
    for (Py_ssize_t position = 0; later != NULL && PyDict_Next(made, &position, &name, NULL);)
        if (PyDict_GetItemWithError(later, name) != NULL && PyDict_DelItem(later, name) < 0)
            return FAILED;
    return later == NULL ? FAILED : pack_one(packer, later);
}

/* Begin to use what a packer has one of. false: an error is set. */
static bool use(Packer *packer)
{
    if (packer->is_used) {
        PyErr_SetString(PyExc_RuntimeError, "this packer saves or loads another world");
        return false;
    }
    return packer->is_used = true;
}

/* pack(parts): the saved fields of all parts; None: Python saves them. */
static PyObject *py_pack(PyObject *self, PyObject *parts)
{
    Packer *packer = (Packer *)self;
    const Py_ssize_t count = PyTuple_Size(packer->parts);
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != count)
        return PyErr_Format(PyExc_TypeError, "a world of this kind has %zd parts", count);
    if (!use(packer))
        return NULL;
    packer->used = 0;
    forget_numbers(&packer->seen);
    packer->taken = PyList_New(0);
    Verdict verdict = packer->taken != NULL && put_head(packer, NONE, 0) ? FOLDED : FAILED;
    for (Py_ssize_t place = 0; verdict == FOLDED && place < count; place++)
        verdict = give_next_number(packer, PyTuple_GetItem(parts, place)) ? FOLDED : FAILED;
    for (Py_ssize_t place = 0; verdict == FOLDED && place < count; place++)
        verdict = pack_part(packer, PyTuple_GetItem(packer->parts, place), PyTuple_GetItem(parts, place));
    Py_CLEAR(packer->taken);
    packer->is_used = false;
    if (verdict == FAILED)
        return NULL;
    if (verdict == REFERENCE)
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(packer->memory, packer->used);
}

/* ----------------------------------------------------------------------------------------- from bytes */

static PyObject *cut_short(void)
{
    PyErr_SetString(PyExc_ValueError, "what was saved is cut short, or was changed");
    return NULL;
}

static bool next_number(Packer *packer, uint64_t *number)
{
    *number = 0;
    for (int shift = 0; packer->next < packer->end && shift < 64; shift += 7) {
        const unsigned char byte = (unsigned char)*packer->next++;
        *number |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return true;
    }
    return cut_short() != NULL;
}

static const char *get(Packer *packer, uint64_t size)
{
    if (size > (uint64_t)(packer->end - packer->next))
        return (const char *)cut_short();
    const char *bytes = packer->next;
    packer->next += size;
    return bytes;
}

/* Keep the next number for an object, which may be NULL as yet. Returns it; -1: no memory. */
static Py_ssize_t keep(Packer *packer, PyObject *one)
{
    if (packer->read_used == packer->read_room) {
        const Py_ssize_t room = 2 * packer->read_room + 256;
        PyObject **read = realloc(packer->read, (size_t)room * sizeof *read);
        if (read == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        packer->read = read;
        packer->read_room = room;
    }
    Py_XINCREF(one);
    packer->read[packer->read_used] = one;
    return packer->read_used++;
}

static PyObject *unpack_one(Packer *packer);

static PyObject *kept(Packer *packer, PyObject *one)
{
    if (one != NULL && keep(packer, one) < 0)
        Py_CLEAR(one);
    return one;
}

/* Append to the list item by item: code that runs meanwhile may read the list. */
static int put_next(PyObject *each, Py_ssize_t place, PyObject *one)
{
    if (PyTuple_Check(each))
        return PyTuple_SetItem(each, place, one);
    const int done = PyList_Append(each, one);
    Py_DECREF(one);
    return done;
}

/* A tuple, a list or a set. A set has no member that names the set. */
static PyObject *unpack_each(Packer *packer, unsigned char head, uint64_t size)
{
    if (size > (uint64_t)(packer->end - packer->next))
        return cut_short();
    const bool is_tuple = head == TUPLE;
    PyObject *each = is_tuple ? PyTuple_New((Py_ssize_t)size) : PyList_New(0), *set;
    const Py_ssize_t number = is_tuple || each == NULL ? 0 : keep(packer, head == SET ? NULL : each);
    if (number < 0)
        Py_CLEAR(each);
    for (Py_ssize_t place = 0; each != NULL && place < (Py_ssize_t)size; place++) {
        PyObject *one = unpack_one(packer);
        if (one == NULL || put_next(each, place, one) < 0)
            Py_CLEAR(each);
    }
    if (head != SET || each == NULL)
        return each;
    set = PySet_New(each);
    Py_DECREF(each);
    Py_XINCREF(set);
    packer->read[number] = set;
    return set;
}

static PyObject *unpack_dict(Packer *packer, uint64_t size)
{
    PyObject *dict = kept(packer, PyDict_New());
    for (uint64_t place = 0; dict != NULL && place < size; place++) {
        PyObject *key = unpack_one(packer), *value = key == NULL ? NULL : unpack_one(packer);
        if (value == NULL || PyDict_SetItem(dict, key, value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *new_of(PyObject *class)
{
    PyObject *nothing = PyTuple_New(0);
    newfunc make = (newfunc)PyType_GetSlot((PyTypeObject *)class, Py_tp_new);
    if (make == NULL)
        PyErr_Format(PyExc_TypeError, "%R makes no objects", class);
    PyObject *one = nothing == NULL || make == NULL ? NULL : make((PyTypeObject *)class, nothing, NULL);
    Py_XDECREF(nothing);
    return one;
}

/* `make` makes it of these values, or is the names of the fields that get them. */
static PyObject *made_of(PyObject *kind, PyObject *values)
{
    PyObject *make = PyTuple_GetItem(kind, 2);
    if (!PyTuple_Check(values))
        return cut_short();
    if (!PyTuple_Check(make))
        return PyObject_Call(make, values, NULL);
    PyObject *one = new_of(PyTuple_GetItem(kind, 0));
    for (Py_ssize_t place = 0; one != NULL && place < PyTuple_Size(make); place++) {
        PyObject *value = PyTuple_GetItem(values, place);
        if (value == NULL || PyObject_SetAttr(one, PyTuple_GetItem(make, place), value) < 0)
            Py_CLEAR(one);
    }
    return one;
}

static PyObject *unpack_known(Packer *packer, bool is_instance, uint64_t number)
{
    PyObject *kind = number < (uint64_t)PyTuple_Size(packer->kinds)
                         ? PyTuple_GetItem(packer->kinds, (Py_ssize_t)number)
                         : NULL;
    if (kind == NULL || (PyTuple_GetItem(kind, 1) == Py_None) != is_instance)
        return cut_short();
    PyObject *one = NULL, *fields = NULL;
    if (is_instance) {
        one = kept(packer, new_of(PyTuple_GetItem(kind, 0)));
        fields = one == NULL ? NULL : unpack_one(packer);
        if (fields == NULL || PyObject_SetAttr(one, name_of(N___dict__), fields) < 0)
            Py_CLEAR(one);
    } else {
        const Py_ssize_t place = keep(packer, NULL);
        fields = place < 0 ? NULL : unpack_one(packer);
        one = fields == NULL ? NULL : made_of(kind, fields);
        if (one != NULL) {
            Py_INCREF(one);
            packer->read[place] = one;
        }
    }
    Py_XDECREF(fields);
    return one;
}

static PyObject *unpack_one(Packer *packer)
{
    const char *bytes = get(packer, 1);
    if (bytes == NULL)
        return NULL;
    const unsigned char head = (unsigned char)*bytes;
    if (head >= SHORT)
        return PyLong_FromLong(head & 0x7f);
    if (head == NONE || head == TRUE || head == FALSE) {
        PyObject *one = head == NONE ? Py_None : head == TRUE ? Py_True : Py_False;
        Py_INCREF(one);
        return one;
    }
    uint64_t number;
    double value;
    if (!next_number(packer, &number))
        return NULL;
    switch (head) {
    case INT:
        return PyLong_FromLongLong((long long)(number >> 1) ^ -(long long)(number & 1));
    case FLOAT:
        if ((bytes = get(packer, sizeof value)) == NULL)
            return NULL;
        memcpy(&value, bytes, sizeof value);
        return PyFloat_FromDouble(value);
    case BYTES:
        bytes = get(packer, number);
        return bytes == NULL ? NULL : kept(packer, PyBytes_FromStringAndSize(bytes, (Py_ssize_t)number));
    case TEXT:
        bytes = get(packer, number);
        return bytes == NULL ? NULL : kept(packer, PyUnicode_FromStringAndSize(bytes, (Py_ssize_t)number));
    case AGAIN:
        if (number >= (uint64_t)packer->read_used || packer->read[number] == NULL)
            return cut_short();
        Py_INCREF(packer->read[number]);
        return packer->read[number];
    }
    if (head > MADE)
        return cut_short();
    if (Py_EnterRecursiveCall(" to load a world"))
        return NULL;
    PyObject *one = head == DICT   ? unpack_dict(packer, number)
                    : head > SET   ? unpack_known(packer, head == INSTANCE, number)
                                   : unpack_each(packer, head, number);
    Py_LeaveRecursiveCall();
    return one;
}

/* The saved fields, in place of those of the blank part, and the fields that it got later. */
static bool unpack_part(Packer *packer, PyObject *blank, PyObject *part)
{
    PyObject *fields = PyDict_Copy(PyTuple_GetItem(blank, 1)), *names = PyTuple_GetItem(blank, 2);
    bool done = fields != NULL && PyObject_SetAttr(part, name_of(N___dict__), fields) == 0;
    for (Py_ssize_t place = 0; done && place < PyTuple_Size(names); place++) {
        PyObject *value = unpack_one(packer);
        done = value != NULL && PyDict_SetItem(fields, PyTuple_GetItem(names, place), value) == 0;
        Py_XDECREF(value);
    }
    PyObject *later = done ? unpack_one(packer) : NULL;
    done = later != NULL && (later == Py_None || PyDict_Update(fields, later) == 0);
    Py_XDECREF(later);
    Py_XDECREF(fields);
    return done;
}

/* unpack(packed): the parts, as a list. */
static PyObject *py_unpack(PyObject *self, PyObject *packed)
{
    Packer *packer = (Packer *)self;
    char *bytes;
    Py_ssize_t size, count = PyTuple_Size(packer->parts);
    if (PyBytes_AsStringAndSize(packed, &bytes, &size) < 0 || !use(packer))
        return NULL;
    packer->next = bytes;
    packer->end = bytes + size;
    packer->read_used = 0;
    PyObject *parts = PyList_New(0);
    bool done = parts != NULL && get(packer, 2) != NULL;
    for (Py_ssize_t place = 0; done && place < PyTuple_Size(packer->constants); place++)
        done = keep(packer, PyTuple_GetItem(packer->constants, place)) >= 0;
    for (Py_ssize_t place = 0; done && place < count; place++) {
        PyObject *part = new_of(PyTuple_GetItem(PyTuple_GetItem(packer->parts, place), 0));
        done = part != NULL && keep(packer, part) >= 0 && PyList_Append(parts, part) == 0;
        Py_XDECREF(part);
    }
    for (Py_ssize_t place = 0; done && place < count; place++)
        done = unpack_part(packer, PyTuple_GetItem(packer->parts, place), PyList_GetItem(parts, place));
    for (; packer->read_used > 0; packer->read_used--)
        Py_XDECREF(packer->read[packer->read_used - 1]);
    packer->is_used = false;
    if (!done)
        Py_CLEAR(parts);
    return parts;
}

/* --------------------------------------------------------------------------------------- for Python */

/* Whether this is what `parts` or `kinds` consist of. false: an error is set. */
static bool is_row(PyObject *row, bool of_parts)
{
    const bool fits = PyTuple_Check(row) && PyTuple_Size(row) == 3 && PyType_Check(PyTuple_GetItem(row, 0)) &&
                      (!of_parts || (PyDict_Check(PyTuple_GetItem(row, 1)) && PyTuple_Check(PyTuple_GetItem(row, 2))));
    if (!fits)
        PyErr_SetString(PyExc_TypeError, of_parts ? "a part is (class, dict of fields, names of fields)"
                                                  : "a kind is (class, take, make)");
    return fits;
}

static PyObject *packer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"parts", "kinds", "constants", NULL};
    PyObject *parts, *kinds, *constants;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!O!", names, &PyTuple_Type, &parts, &PyTuple_Type,
                                     &kinds, &PyTuple_Type, &constants))
        return NULL;
    Packer *packer = (Packer *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (packer == NULL)
        return NULL;
    Py_INCREF(packer->parts = parts);
    Py_INCREF(packer->kinds = kinds);
    Py_INCREF(packer->constants = constants);
    bool done = true;
    for (Py_ssize_t one = 0; done && one < PyTuple_Size(parts); one++)
        done = is_row(PyTuple_GetItem(parts, one), true);
    for (Py_ssize_t one = 0; done && one < PyTuple_Size(kinds); one++)
        done = is_row(PyTuple_GetItem(kinds, one), false) && give_number(&packer->kind_numbers, PyTuple_GetItem(PyTuple_GetItem(kinds, one), 0), (uint32_t)one);
    for (Py_ssize_t one = 0; done && one < PyTuple_Size(constants); one++)
        done = give_number(&packer->constant_numbers, PyTuple_GetItem(constants, one), (uint32_t)one);
    if (!done)
        Py_CLEAR(packer);
    return (PyObject *)packer;
}

static void packer_dealloc(PyObject *self)
{
    Packer *packer = (Packer *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(packer->parts);
    Py_XDECREF(packer->kinds);
    Py_XDECREF(packer->constants);
    free(packer->constant_numbers.places);
    free(packer->kind_numbers.places);
    free(packer->seen.places);
    free(packer->memory);
    free(packer->read);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"pack", py_pack, METH_O, "The saved fields of all parts as bytes; None if they have an object of no kind."},
    {"unpack", py_unpack, METH_O, "The parts, as a list, without the fields that are made again."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Saves the parts of a world, and makes them again."},
    {Py_tp_new, packer_new},
    {Py_tp_dealloc, packer_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec packer_spec = {
    .name = "kvsm.core.native._body.PackerBody",
    .basicsize = sizeof(Packer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
