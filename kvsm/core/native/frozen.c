/* Copies a frozen state piece by piece, while further events are folded (kvsm/core/ledger/frozen.py). */

#include "frozen.h"

#define MOST 4096 /* most things of one piece */
#define AHEAD 16 /* number of things that are prefetched into the cache before they are read */

/* ------------------------------------------------------------------------------------ the end of a part */

static void release(Py_buffer *buffer)
{
    if (buffer->obj != NULL)
        PyBuffer_Release(buffer);
}

static void forget_kept(FrozenPart *part)
{
    for (uint32_t one = 0; one < part->num_kept; one++) {
        Kept *kept = &part->kept[one >> TABLE_BITS][one & (TABLE_PAGE - 1)];
        Py_CLEAR(kept->first);
        Py_CLEAR(kept->second);
    }
    for (uint32_t page = 0; page < part->num_pages; page++)
        free(part->kept[page]);
    free(part->kept);
    part->kept = NULL;
    part->num_kept = part->num_pages = 0;
    table_clear(&part->table);
}

static void forget_pairs(FrozenPart *part)
{
    for (int32_t one = 0; part->pairs != NULL && one < 2 * part->size; one++)
        Py_CLEAR(part->pairs[one]);
    free(part->pairs);
    part->pairs = NULL;
}

void part_let_go(FrozenPart *part)
{
    if (part->is_written)
        return; /* `go_on` frees it when the piece is written */
    forget_kept(part);
    forget_pairs(part);
    release(&part->word_buffer);
    release(&part->generation_buffer);
    free(part->all_words);
    free(part->row);
    part->all_words = NULL;
    part->row = NULL;
    Py_CLEAR(part->key_of);
    Py_CLEAR(part->brought);
    Py_CLEAR(part->stale);
    Py_CLEAR(part->links);
    for (int stream = 0; part->status != WHOLE && stream < NUM_STREAMS; stream++)
        stream_clear(&part->streams[stream]);
}

static void part_drop(FrozenPart *part)
{
    if (part->status == WHOLE)
        return;
    part->status = DROPPED;
    part_let_go(part);
}

/* ------------------------------------------------------------------------------ one piece of each kind */

/* The end of a piece of at most this cost. A piece has at least one thing. */
static int32_t end_of_piece(const FrozenPart *part, int32_t left)
{
    const int32_t fits = left / part->cost, count = fits < 1 ? 1 : fits > MOST ? MOST : fits;
    return part->size - part->next < count ? part->size : part->next + count;
}

static bool is_indexed(int32_t word) { return FIRST_INDEXED <= state_of(word) && state_of(word) <= LAST_INDEXED; }

/* Write the keys of the slots of a piece. words: the words that these slots had. */
static bool write_keys(FrozenPart *part, const int32_t *words, int32_t count)
{
    Stream *keys = &part->streams[KEYS];
    for (int32_t one = 0; one < count; one++) {
        if (one + AHEAD < count)
            __builtin_prefetch(PyList_GetItem(part->key_of, part->next + one + AHEAD));
        Kept *kept = kept_at(part, part->next + one);
        if (is_indexed(words[one])) {
            PyObject *key = kept != NULL ? kept->first : PyList_GetItem(part->key_of, part->next + one);
            if (key == NULL || !stream_object(keys, key))
                return false;
            keys->items++;
        }
        if (kept != NULL)
            Py_CLEAR(kept->first);
    }
    return true;
}

static bool write_slots(FrozenPart *part, int32_t *left)
{
    if (PyList_Size(part->key_of) < part->size)
        return PyErr_Format(PyExc_RuntimeError, "the list of the slots' keys was made shorter") != NULL;
    int32_t words[MOST];
    int64_t generations[MOST];
    const int32_t end = end_of_piece(part, *left), count = end - part->next;
    *left -= count;
    memcpy(words, part->words + part->next, (size_t)count * sizeof *words);
    memcpy(generations, part->generation + part->next, (size_t)count * sizeof *generations);
    for (int32_t one = 0; one < count; one++) {
        const Kept *kept = kept_at(part, part->next + one);
        if (kept == NULL)
            continue;
        words[one] = kept->word;
        generations[one] = kept->generation;
    }
    const bool done =
        stream_write(&part->streams[WORDS], words, count * (Py_ssize_t)sizeof *words) &&
        stream_write(&part->streams[GENERATIONS], generations, count * (Py_ssize_t)sizeof *generations) &&
        write_keys(part, words, count);
    part->next = end;
    return done;
}

/* The value of a device block in a frozen dict: the kept value if `kept` is not NULL. */
static bool write_note(Stream *stream, PyObject *notes, PyObject *block, const Kept *kept, PyObject *note)
{
    if (kept == NULL)
        note = PyDict_Size(notes) == 0 ? NULL : PyDict_GetItemWithError(notes, block);
    return note == NULL ? !PyErr_Occurred() : stream_pair(stream, block, note);
}

static bool write_notes(FrozenPart *part, int32_t block)
{
    PyObject *number = PyLong_FromLong(block);
    Kept *kept = kept_at(part, block);
    const bool done = number != NULL &&
                      write_note(&part->streams[BROUGHT], part->brought, number, kept, kept ? kept->first : NULL) &&
                      write_note(&part->streams[STALE], part->stale, number, kept, kept ? kept->second : NULL);
    Py_XDECREF(number);
    if (kept != NULL) {
        Py_CLEAR(kept->first);
        Py_CLEAR(kept->second);
    }
    return done;
}

static bool write_device_blocks(FrozenPart *part, int32_t *left)
{
    int32_t words[MOST];
    const int32_t end = end_of_piece(part, *left);
    bool done = true;
    *left -= (end - part->next) * part->cost;
    for (int32_t block = part->next; block < end; block++) {
        const Kept *kept = kept_at(part, block);
        words[block - part->next] = kept != NULL ? kept->word : part->words[block];
    }
    const bool noted = part->num_kept > 0 || PyDict_Size(part->brought) > 0 || PyDict_Size(part->stale) > 0;
    for (int32_t block = part->next; done && noted && block < end; block++)
        done = write_notes(part, block);
    done = done &&
           stream_write(&part->streams[WORDS], words, (end - part->next) * (Py_ssize_t)sizeof *words);
    part->next = end;
    return done;
}

static bool write_offers(FrozenPart *part, int32_t *left)
{
    const int32_t end = end_of_piece(part, *left);
    *left -= (end - part->next) * part->cost;
    for (; part->next < end; part->next++) {
        PyObject **pair = part->pairs + 2 * (Py_ssize_t)part->next;
        if (!stream_pair(&part->streams[WORDS], pair[0], pair[1]))
            return false;
        Py_CLEAR(pair[0]);
        Py_CLEAR(pair[1]);
    }
    return true;
}

/* The next slot of a queue's row; -1: none is left. */
static int64_t next_of_row(FrozenPart *part)
{
    while (part->group < part->groups && part->row[part->group] == 0)
        part->group++;
    if (part->group == part->groups)
        return -1;
    const int place = __builtin_ctzll(part->row[part->group]);
    part->row[part->group] &= part->row[part->group] - 1;
    return (int64_t)part->group * GROUP + place;
}

/* The next slot of a queue's list; -1: none is left. */
static int64_t next_of_list(FrozenPart *part)
{
    const int32_t node = part->node;
    if (node != 0) {
        const uint32_t old = table_at(&part->table, node);
        part->node = old != 0 ? (int32_t)(old - 1) : part->live[node];
    }
    return (int64_t)node - 1;
}

/* The slots of a queue, four bytes each, the lowest first. */
static bool write_order(FrozenPart *part, int32_t *left)
{
    unsigned char bytes[4 * MOST], *at = bytes;
    for (; *left > 0 && part->next < part->size && at < bytes + sizeof bytes; part->next++) {
        int64_t slot = next_of_row(part);
        *left -= slot >= 0 ? 1 : part->cost;
        if (slot < 0 && (slot = next_of_list(part)) < 0) {
            PyErr_SetString(PyExc_SystemError, "a queue was changed behind the back of its copy");
            return false;
        }
        for (int place = 0; place < 4; place++)
            *at++ = (unsigned char)(slot >> 8 * place);
    }
    return stream_write(&part->streams[WORDS], bytes, at - bytes);
}

static bool (*const write_piece[])(FrozenPart *, int32_t *) = {
    [SLOTS] = write_slots,
    [DEVICE_BLOCKS] = write_device_blocks,
    [OFFERS] = write_offers,
    [ORDER] = write_order,
};

/* Write the next piece of an open part. left: the cost it may take; then the rest of it. May set a Python error. */
static void go_on(FrozenPart *part, int32_t *left)
{
    while (part->status == OPEN && *left > 0 && !part->is_written) {
        part->is_written = true;
        const bool done = write_piece[part->kind](part, left);
        part->is_written = false;
        if (part->status == OPEN)
            part->status = !done ? BROKEN : part->next == part->size ? WHOLE : OPEN;
        if (part->status != OPEN)
            part_let_go(part);
    }
}

void part_finish(FrozenPart *part)
{
    if (part->is_written) { /* an event is folded while a piece is written */
        part->status = BROKEN;
        return;
    }
    while (part->status == OPEN) {
        int32_t left = MOST;
        go_on(part, &left);
    }
    PyErr_Clear();
}

/* ---------------------------------------------------------------------------------------------- freeze */

static FrozenPart *make_part(PartKind kind, int64_t size, int32_t cost)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(python.frozen_part, Py_tp_alloc);
    FrozenPart *part = (FrozenPart *)allocate(python.frozen_part, 0);
    if (part == NULL)
        return NULL;
    part->kind = kind;
    part->size = (int32_t)size;
    part->cost = cost;
    part->status = size == 0 ? WHOLE : OPEN;
    return part;
}

/* A part over the words of many things. */
static FrozenPart *part_of_words(PartKind kind, const Words *words)
{
    FrozenPart *part = make_part(kind, words->size, kind == SLOTS ? 1 : 4);
    if (part == NULL)
        return NULL;
    if (!table_make(&part->table, words->size) ||
        PyObject_GetBuffer(words->buffer.obj, &part->word_buffer, PyBUF_CONTIG_RO) < 0) {
        part->word_buffer.obj = NULL;
        Py_CLEAR(part);
        return NULL;
    }
    part->words = part->word_buffer.buf;
    return part;
}

static FrozenPart *part_of_slots(Folding *folding)
{
    const Fold *fold = folding->fold;
    FrozenPart *part = part_of_words(SLOTS, &fold->blocks);
    if (part == NULL)
        return NULL;
    if (PyObject_GetBuffer(fold->generation_owner, &part->generation_buffer, PyBUF_CONTIG_RO) < 0) {
        part->generation_buffer.obj = NULL;
        Py_CLEAR(part);
        return NULL;
    }
    part->generation = part->generation_buffer.buf;
    part->key_of = field(folding, N_key_of);
    Py_INCREF(part->key_of);
    return part;
}

static FrozenPart *part_of_device_blocks(Folding *folding)
{
    PyObject *provenance = field(folding, N_provenance);
    FrozenPart *part = part_of_words(DEVICE_BLOCKS, &folding->fold->leases);
    if (part == NULL)
        return NULL;
    part->brought = provenance == NULL ? NULL : attribute_of(provenance, N_brought);
    part->stale = provenance == NULL ? NULL : attribute_of(provenance, N_stale);
    if (part->brought == NULL || part->stale == NULL || !PyDict_CheckExact(part->brought) ||
        !PyDict_CheckExact(part->stale))
        Py_CLEAR(part);
    return part;
}

/* The dict of an `OfferHistory` is in the order of its keys: a key that moves is taken out and put in again. */
static FrozenPart *part_of_offers(Folding *folding)
{
    PyObject *offers = field(folding, N_offers), *key, *number;
    PyObject *times = offers == NULL ? NULL : attribute_of(offers, N_times);
    FrozenPart *part = times == NULL || !PyDict_Check(times) ? NULL : make_part(OFFERS, PyDict_Size(times), 4);
    if (part != NULL && part->size > 0) {
        part->pairs = calloc(2 * (size_t)part->size, sizeof *part->pairs);
        if (part->pairs == NULL) {
            PyErr_NoMemory();
            Py_CLEAR(part);
        }
    }
    PyObject **pair = part == NULL ? NULL : part->pairs;
    for (Py_ssize_t place = 0; part != NULL && PyDict_Next(times, &place, &key, &number); pair += 2) {
        Py_INCREF(key);
        Py_INCREF(number);
        pair[0] = key;
        pair[1] = number;
    }
    Py_XDECREF(times);
    return part;
}

/* The cost of a node of a linked list: each node is read after the one before, and larger lists miss the cache more. */
static int32_t cost_of_node(int32_t nodes) { return nodes <= 1 << 18 ? 2 : nodes <= 1 << 21 ? 4 : 8; }

/* The row is copied at once: a bit for each slot. */
static FrozenPart *part_of_queue(const SlotQueue *queue)
{
    FrozenPart *part = make_part(ORDER, queue->size, cost_of_node(queue->capacity));
    if (part == NULL)
        return NULL;
    const size_t bytes = (size_t)queue->groups * sizeof *part->row;
    part->row = malloc(bytes + 1);
    if (part->row == NULL)
        PyErr_NoMemory();
    if (part->row == NULL || !table_make(&part->table, (int64_t)queue->capacity + 1)) {
        Py_CLEAR(part);
        return NULL;
    }
    memcpy(part->row, queue->row, bytes);
    part->group = queue->row_from;
    part->groups = queue->groups;
    Py_INCREF(queue->links);
    part->links = queue->links;
    part->live = queue->next;
    part->node = queue->next[0];
    return part;
}

/* From now on the queue keeps the old links for this copy; an earlier copy is dropped. */
static void watch_queue(SlotQueue *queue, FrozenPart *part)
{
    if (queue->frozen != NULL)
        part_drop(queue->frozen);
    Py_CLEAR(queue->frozen);
    Py_INCREF((PyObject *)part);
    queue->frozen = part;
}

PyObject *freeze_queue(SlotQueue *queue)
{
    FrozenPart *part = part_of_queue(queue);
    if (part != NULL)
        watch_queue(queue, part);
    return (PyObject *)part;
}

static void drop_last_copy(Fold *fold)
{
    for (Py_ssize_t one = 0; fold->frozen != NULL && one < NUM_PARTS; one++)
        part_drop((FrozenPart *)PyTuple_GetItem(fold->frozen, one));
    Py_CLEAR(fold->frozen);
}

PyObject *freeze(Folding *folding)
{
    SlotQueue *free_slots = free_queue(folding);
    FrozenPart *made[NUM_PARTS] = {0};
    if (free_slots == NULL)
        return NULL;
    const bool all = (made[0] = part_of_slots(folding)) != NULL &&
                     (made[1] = part_of_device_blocks(folding)) != NULL &&
                     (made[2] = part_of_offers(folding)) != NULL &&
                     (made[3] = part_of_queue(free_slots)) != NULL;
    PyObject *parts = all ? PyTuple_New(NUM_PARTS) : NULL;
    for (int one = 0; one < NUM_PARTS; one++) {
        if (parts == NULL)
            Py_XDECREF((PyObject *)made[one]);
        else
            PyTuple_SetItem(parts, one, (PyObject *)made[one]);
    }
    if (parts == NULL)
        return NULL;
    drop_last_copy(folding->fold);
    watch_queue(free_slots, made[3]);
    Py_INCREF(parts);
    folding->fold->frozen = parts;
    return parts;
}

/* --------------------------------------------------------------------------------------- for Python */

/* go_on(left): write a piece of at most this cost. Returns the rest of the cost if the part is complete, else 0. */
static PyObject *py_go_on(PyObject *self, PyObject *may_cost)
{
    FrozenPart *part = (FrozenPart *)self;
    int64_t number;
    if (!read_number(may_cost, &number) || number > INT32_MAX)
        return PyErr_Format(PyExc_TypeError, "what a piece may cost is a number");
    int32_t left = (int32_t)number;
    if (part->is_written)
        return PyErr_Format(PyExc_RuntimeError, "this part of the state is being written");
    go_on(part, &left);
    if (PyErr_Occurred())
        return NULL;
    if (part->status == BROKEN)
        return PyErr_NoMemory();
    if (part->status == DROPPED)
        return PyErr_Format(PyExc_RuntimeError, "this copy of the state was dropped");
    return PyLong_FromLong(part->status == WHOLE && left > 0 ? left : 0);
}

static PyObject *py_take(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    FrozenPart *part = (FrozenPart *)self;
    if (part->status != WHOLE)
        return PyErr_Format(PyExc_RuntimeError, "this part of the state is not whole");
    PyObject *taken = PyList_New(NUM_STREAMS);
    for (int stream = 0; taken != NULL && stream < NUM_STREAMS; stream++) {
        PyObject *pieces = stream_taken(&part->streams[stream]);
        if (pieces == NULL)
            Py_CLEAR(taken);
        else
            PyList_SetItem(taken, stream, pieces);
    }
    return taken;
}

static PyObject *py_drop(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    part_drop((FrozenPart *)self);
    Py_RETURN_NONE;
}

static void part_dealloc(PyObject *self)
{
    FrozenPart *part = (FrozenPart *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    part_let_go(part);
    for (int stream = 0; stream < NUM_STREAMS; stream++)
        stream_clear(&part->streams[stream]);
    release_memory(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"go_on", py_go_on, METH_O,
     "Write what costs so much, in the time of a slot. Returns what is left of it, if the part is whole; else 0."},
    {"take", py_take, METH_NOARGS,
     "What was written, once: for each stream, how many items it has, and its bytes in pieces."},
    {"drop", py_drop, METH_NOARGS, "Nobody needs this part, unless it is whole."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, "A part of a state as it was frozen. `FoldBody.freeze` makes it."},
    {Py_tp_dealloc, part_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec frozen_part_spec = {
    .name = "kvsm.core.native._body.FrozenPart",
    .basicsize = sizeof(FrozenPart),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = type_slots,
};
