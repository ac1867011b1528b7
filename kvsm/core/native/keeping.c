/* Keeps the old values of all things that an event may change, for parts of a frozen state that have not written them.

   An event changes the slots and the device blocks that it names, those of the transfers that it names, and the pins
   of its request (`changes` in tables.h). Their values are kept before the event is folded in C or in Python, so no
   handler has to deal with a copy in progress. Only a reset and a restart change more: they end all transfers, and
   change the words of all things. Queues keep their own links, because a slot's neighbours change with it. */

#include "frozen.h"

static void part_broken(FrozenPart *part)
{
    part_let_go(part);
    part->status = BROKEN;
}

/* ------------------------------------------------------------------------------------------ one thing */

bool table_make(Table *table, int64_t things)
{
    table->num_pages = (int32_t)(things / TABLE_PAGE + 1);
    table->pages = calloc((size_t)table->num_pages, sizeof *table->pages);
    return table->pages != NULL || PyErr_NoMemory() != NULL;
}

bool table_put(Table *table, int64_t thing, uint32_t number)
{
    uint32_t **page = &table->pages[thing >> TABLE_BITS];
    if (*page == NULL && (*page = calloc(TABLE_PAGE, sizeof **page)) == NULL)
        return false;
    (*page)[thing & (TABLE_PAGE - 1)] = number;
    return true;
}

void table_clear(Table *table)
{
    for (int32_t page = 0; table->pages != NULL && page < table->num_pages; page++)
        free(table->pages[page]);
    free(table->pages);
    table->pages = NULL;
}

/* Where the next one is kept; NULL: no memory. */
static Kept *room_for_one(FrozenPart *part)
{
    const uint32_t page = part->num_kept >> TABLE_BITS, place = part->num_kept & (TABLE_PAGE - 1);
    if (page == part->num_pages) {
        Kept **kept = realloc(part->kept, (page + 1) * sizeof *kept);
        if (kept == NULL)
            return NULL;
        part->kept = kept;
        if ((kept[page] = malloc(TABLE_PAGE * sizeof **kept)) == NULL)
            return NULL;
        part->num_pages++;
    }
    return &part->kept[page][place];
}

/* What a dict has of a device block; borrowed, or NULL. */
static PyObject *note_of(PyObject *notes, PyObject *block)
{
    return PyDict_Size(notes) == 0 ? NULL : PyDict_GetItemWithError(notes, block);
}

static bool keep_notes(const FrozenPart *part, int64_t block, Kept *kept)
{
    PyObject *number = PyLong_FromLongLong(block);
    if (number == NULL)
        return false;
    kept->first = note_of(part->brought, number);
    kept->second = note_of(part->stale, number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

static void keep(FrozenPart *part, int64_t thing)
{
    if (thing < part->next || thing >= part->size || table_at(&part->table, thing) != 0)
        return;
    Kept *kept = room_for_one(part), now = {.word = part->words[thing]};
    bool done = kept != NULL;
    if (part->kind == DEVICE_BLOCKS)
        done = done && keep_notes(part, thing, &now);
    else {
        now.generation = part->generation[thing];
        now.first = PyList_GetItem(part->key_of, (Py_ssize_t)thing);
    }
    if (!done || !table_put(&part->table, thing, part->num_kept + 1)) {
        PyErr_Clear();
        part_broken(part);
        return;
    }
    Py_XINCREF(now.first);
    Py_XINCREF(now.second);
    *kept = now;
    part->num_kept++;
}

/* Keep a batch. What this body cannot read, Python may be able to: then nothing is left to be kept. */
static void keep_batch(FrozenPart *part, PyObject *ids)
{
    Batch batch;
    if (part->status != OPEN)
        return;
    if (!batch_of(&batch, ids)) {
        part_finish(part);
        return;
    }
    const bool is_written = part->is_written;
    part->is_written = true; /* a note of a device block may be looked up by code of Python */
    for (Py_ssize_t one = 0; one < batch.count && part->status == OPEN; one++)
        keep(part, batch.ids[one]);
    part->is_written = is_written;
    if (part->status != OPEN)
        part_let_go(part);
    batch_clear(&batch);
}

static void keep_batch_of(FrozenPart *part, PyObject *owner, Name name)
{
    PyObject *ids = part->status == OPEN ? attribute_of(owner, name) : NULL;
    PyErr_Clear();
    keep_batch(part, ids);
    Py_XDECREF(ids);
}

/* Keep all words, and the notes that a reset mixes. */
static void keep_all_words(FrozenPart *part)
{
    if (part->status != OPEN || part->all_words != NULL)
        return;
    const size_t bytes = (size_t)part->size * sizeof *part->all_words;
    PyObject *stale = part->kind == DEVICE_BLOCKS ? PyDict_Copy(part->stale) : NULL;
    part->all_words = malloc(bytes);
    if (part->all_words == NULL || (part->kind == DEVICE_BLOCKS && stale == NULL)) {
        PyErr_Clear();
        Py_XDECREF(stale);
        part_broken(part);
        return;
    }
    memcpy(part->all_words, part->words, bytes);
    part->words = part->all_words;
    if (stale != NULL) {
        Py_DECREF(part->stale);
        part->stale = stale;
    }
}

/* -------------------------------------------------------------------------------------- one event */

/* A record of the ledger; borrowed. NULL: there is none, or an error is set. */
static PyObject *record_of(Folding *folding, Name records, PyObject *id)
{
    PyObject *dict = field(folding, records);
    return id == NULL || dict == NULL || !PyDict_Check(dict) ? NULL : PyDict_GetItemWithError(dict, id);
}

/* Write the rest of both parts at once: what the event changes cannot be read, perhaps because there is no memory. */
static void finish_both(FrozenPart *slots, FrozenPart *blocks)
{
    PyErr_Clear();
    if (slots->status == OPEN)
        part_finish(slots);
    if (blocks->status == OPEN)
        part_finish(blocks);
}

static void keep_transfer(Folding *folding, FrozenPart *slots, FrozenPart *blocks, PyObject *id)
{
    PyObject *transfer = record_of(folding, N_transfers, id);
    if (transfer != NULL) {
        keep_batch_of(slots, transfer, N_slots);
        keep_batch_of(blocks, transfer, N_device_blocks);
    } else if (PyErr_Occurred())
        finish_both(slots, blocks);
    /* else the event will be refused */
}

/* ids: anything that has them in turn. */
static void keep_transfers(Folding *folding, FrozenPart *slots, FrozenPart *blocks, PyObject *ids)
{
    PyObject *all = ids == NULL ? NULL : PySequence_List(ids);
    if (all == NULL)
        finish_both(slots, blocks);
    for (Py_ssize_t one = 0; all != NULL && one < PyList_Size(all); one++)
        keep_transfer(folding, slots, blocks, PyList_GetItem(all, one));
    Py_XDECREF(all);
}

static void keep_named(Folding *folding, FrozenPart *slots, FrozenPart *blocks, int changed)
{
    PyObject *id = NULL, *ids = NULL, *request = NULL;
    if (changed & ITS_SLOTS)
        keep_batch_of(slots, folding->event, N_slots);
    if (changed & ITS_BLOCKS)
        keep_batch_of(blocks, folding->event, N_device_blocks);
    if (changed & ITS_TRANSFERS) {
        ids = value_of(folding, N_transfers);
        keep_transfers(folding, slots, blocks, ids);
    }
    if (changed & ITS_TRANSFER) {
        id = value_of(folding, N_transfer);
        keep_transfer(folding, slots, blocks, id);
    }
    if (changed & ITS_PINS) {
        request = value_of(folding, N_request);
        PyObject *record = record_of(folding, N_requests, request);
        if (record != NULL)
            keep_batch_of(slots, record, N_pins);
        else if (PyErr_Occurred())
            finish_both(slots, blocks);
    }
    Py_XDECREF(id);
    Py_XDECREF(ids);
    Py_XDECREF(request);
}

static bool any_is_open(PyObject *parts)
{
    for (Py_ssize_t one = 0; one < PyTuple_Size(parts); one++)
        if (((FrozenPart *)PyTuple_GetItem(parts, one))->status == OPEN)
            return true;
    return false;
}

void keep_for_event(Folding *folding, int kind)
{
    PyObject *parts = folding->fold->frozen;
    PyErr_Clear(); /* of an event without a number */
    if (!any_is_open(parts)) {
        Py_CLEAR(folding->fold->frozen);
        return;
    }
    FrozenPart *slots = (FrozenPart *)PyTuple_GetItem(parts, SLOTS);
    FrozenPart *blocks = (FrozenPart *)PyTuple_GetItem(parts, DEVICE_BLOCKS);
    if (changes[kind] & EVERYTHING) {
        keep_transfers(folding, slots, blocks, field(folding, N_transfers));
        keep_all_words(slots);
        keep_all_words(blocks);
    } else if (changes[kind] != NOTHING)
        keep_named(folding, slots, blocks, changes[kind]);
}

/* ------------------------------------------------------------------------------------------ queues */

/* The copy knows how many slots the list has, and the first one: so it needs no link of the last node, nor of the head.
   A node that was in no list is kept, too: nobody looks at it. */
void keep_link(SlotQueue *queue, int32_t node)
{
    FrozenPart *part = queue->frozen;
    if (part->status != OPEN)
        Py_CLEAR(queue->frozen);
    else if (table_at(&part->table, node) == 0 && !table_put(&part->table, node, (uint32_t)queue->next[node] + 1))
        part_broken(part);
}
