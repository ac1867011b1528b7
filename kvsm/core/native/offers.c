/* Which requests are due, and which chunks they offer (kvsm/core/scheduler/offers.py, offer_batch.py, tracked.py), for
   engines with one group of full attention.

   Attributes of an engine's request are read before anything is changed, because reading them may run code and raise. */

#include "calls.h"

/* Python objects that this file uses. Never freed: they live as long as the process. */
static struct OfOffers {
    PyObject *offer_batch, *chunks_made, *reached_made, *full, *no_tokens;
} of;

static void let_go(PyObject *const *objects, size_t count)
{
    for (size_t one = 0; one < count; one++)
        Py_XDECREF(objects[one]);
}

/* An attribute; owned. NULL: an error is set, or there is no owner. */
static PyObject *get(PyObject *owner, Name name) { return owner == NULL ? NULL : attribute_of(owner, name); }

static Verdict get_int(PyObject *owner, Name name, int64_t *number)
{
    PyObject *value = get(owner, name);
    const Verdict verdict = value == NULL ? FAILED : read_number(value, number) ? FOLDED : REFERENCE;
    Py_XDECREF(value);
    return verdict;
}

/* Numbers of an engine's request, in the order in which Python reads them. */
enum { COMPUTED, PLACEHOLDERS, PROMPT, ALL, NUM_NUMBERS };

static Verdict ask_engine(PyObject *request, int count, int64_t *numbers)
{
    static const Name names[] = {N_num_computed_tokens, N_num_output_placeholders, N_num_prompt_tokens, N_num_tokens};
    Verdict verdict = FOLDED;
    for (int one = 0; verdict == FOLDED && one < count; one++)
        verdict = get_int(request, names[one], &numbers[one]);
    return verdict;
}

static bool is(PyObject *owner, Name name, const PyObject *wanted)
{
    PyObject *value = get(owner, name);
    Py_XDECREF(value); /* only compared */
    return value == wanted && value != NULL;
}

static bool is_tracked(PyObject *object) { return (PyObject *)Py_TYPE(object) == python.member_classes[TRACKED].class; }

/* ------------------------------------------------------------------------------------- offers.py: due */

/* Add the request of this name if it may have a chunk to offer. */
static Verdict add_due(PyObject *due, PyObject *requests, PyObject *name, bool is_eager)
{
    int64_t numbers[NUM_NUMBERS], next_offer;
    if (!PyUnicode_CheckExact(name))
        return REFERENCE;
    PyObject *tracked = owned(PyDict_GetItemWithError(requests, name));
    if (tracked == NULL)
        return PyErr_Occurred() ? FAILED : FOLDED;
    PyObject *request = is_tracked(tracked) ? get(tracked, N_request) : NULL;
    Verdict verdict = is_tracked(tracked) ? ask_engine(request, PLACEHOLDERS + 1, numbers) : REFERENCE;
    if (verdict == FOLDED)
        verdict = get_int(tracked, N_next_offer, &next_offer);
    if (verdict == FOLDED && numbers[COMPUTED] - numbers[PLACEHOLDERS] >= next_offer &&
        (is_eager || is(tracked, N_remote_decode, Py_True)) && PyDict_SetItem(due, name, tracked) < 0)
        verdict = FAILED;
    Py_XDECREF(request);
    Py_DECREF(tracked);
    return verdict;
}

/* Whether these names are still there if they are left to Python. */
static bool can_be_read_again(PyObject *names)
{
    return PyDict_CheckExact(names) || PyList_CheckExact(names) || PyTuple_CheckExact(names) ||
           PyAnySet_CheckExact(names);
}

/* find_due(requests, scheduled, is_eager): the due requests by name. None: left to Python. */
PyObject *find_due(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *requests, *scheduled, *eager, *name;
    if (!PyArg_UnpackTuple(arguments, "find_due", 3, 3, &requests, &scheduled, &eager))
        return NULL;
    if (!PyDict_CheckExact(requests) || !can_be_read_again(scheduled))
        Py_RETURN_NONE;
    PyObject *names = PyObject_GetIter(scheduled), *due = names == NULL ? NULL : PyDict_New();
    Verdict verdict = due == NULL ? FAILED : FOLDED;
    while (verdict == FOLDED && (name = PyIter_Next(names)) != NULL) {
        verdict = add_due(due, requests, name, eager == Py_True);
        Py_DECREF(name);
    }
    Py_XDECREF(names);
    if (verdict == FOLDED && !PyErr_Occurred())
        return due;
    Py_XDECREF(due);
    return PyErr_Occurred() ? NULL : owned(Py_None);
}

/* ------------------------------------------------------------------------- offer_batch.py: collect */

enum { KEYS, BLOCKS, RUN_LIST, STARTS, BEGUN, PARENTS, REACHED, OFFERED_BEFORE, NUM_PARTS };

static const Name part_names[NUM_PARTS] = {N_keys,   N_blocks,   N__runs,    N__starts,
                                           N__begun, N__parents, N__reached, N__offered_before};

/* A batch. The objects are owned. */
typedef struct {
    PyObject *parts[NUM_PARTS], *records; /* of the ledger's requests */
    int64_t size, tokens;                 /* device blocks and tokens of a chunk */
} Offers;

/* The only item of a tuple; borrowed. NULL: it has more. */
static PyObject *only(PyObject *tuple)
{
    return tuple != NULL && PyTuple_CheckExact(tuple) && PyTuple_Size(tuple) == 1 ? PyTuple_GetItem(tuple, 0) : NULL;
}

/* Whether the engine has one group, which has full attention and no drafter. */
static bool has_one_full_group(PyObject *config, int64_t *block_tokens)
{
    PyObject *groups = get(config, N_groups), *group = only(groups);
    const bool fits = is(group, N_kind, of.full) && is(group, N_drafter, Py_False) &&
           get_int(group, N_block_tokens, block_tokens) == FOLDED;
    Py_XDECREF(groups);
    return fits;
}

/* Read the parts of a batch. false: left to Python. */
static bool offers_begin(Offers *offers, PyObject *batch)
{
    bool fits = (PyObject *)Py_TYPE(batch) == of.offer_batch;
    for (int part = 0; fits && part < NUM_PARTS; part++) {
        PyObject *object = offers->parts[part] = get(batch, part_names[part]);
        fits = object != NULL && (part <= BEGUN     ? PyList_CheckExact(object)
                                  : part <= REACHED ? PyDict_CheckExact(object)
                                                    : PyAnySet_CheckExact(object));
    }
    if (!fits || !is(batch, N__has_threshold, Py_False))
        return false;
    PyObject *core = get(batch, N__offloader), *ledger = get(core, N_ledger);
    offers->records = get(ledger, N_requests);
    PyObject *config = offers->records == NULL ? NULL : get(batch, N__config);
    fits = offers->records != NULL && PyDict_CheckExact(offers->records) &&
           has_one_full_group(config, &offers->tokens) &&
           get_int(batch, N__blocks_per_chunk, &offers->size) == FOLDED && 0 < offers->tokens &&
           offers->tokens <= INT32_MAX && 0 < offers->size && offers->size <= INT32_MAX;
    offers->tokens *= fits ? offers->size : 0;
    Py_XDECREF(core);
    Py_XDECREF(ledger);
    Py_XDECREF(config);
    return fits;
}

/* A request, and the chunks that it offers. The objects are owned. */
typedef struct {
    PyObject *tracked, *name, *record, *hashes, *layout, *table;
    int64_t numbers[NUM_NUMBERS], stride, next_offer; /* stride: hashes of a chunk */
    Py_ssize_t full, settled, offered;                /* chunks: how many are full, and its cursors before this batch */
    bool has_no_cursors;
} Request;

/* Find the record of a request that has not finished. */
static bool find_record(const Offers *offers, Request *request)
{
    int64_t word;
    request->name = get(request->tracked, N_name);
    if (request->name != NULL && PyUnicode_CheckExact(request->name))
        request->record = owned(PyDict_GetItemWithError(offers->records, request->name));
    return request->record != NULL && (PyObject *)Py_TYPE(request->record) == python.request_record &&
           get_number(request->record, N_word, &word) && state_of((int32_t)word) != REQUEST_FINISHED;
}

/* The suffix of the request's keys; borrowed. Sets `stride`. NULL: left to Python. */
static PyObject *suffix_of(Request *request)
{
    PyObject *layout = request->layout = get(request->tracked, N__layout);
    if (layout == NULL || !PyTuple_Check(layout) || PyTuple_Size(layout) != 2)
        return NULL;
    PyObject *suffix = only(PyTuple_GetItem(layout, 0));
    const bool fits = read_number(only(PyTuple_GetItem(layout, 1)), &request->stride) && request->stride > 0;
    return fits && suffix != NULL && PyBytes_CheckExact(suffix) ? suffix : NULL;
}

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

/* The table of the request's device blocks; owned. NULL: left to Python. */
static PyObject *table_of(PyObject *tracked)
{
    PyObject *tables = get(tracked, N_tables), *table = NULL;
    if (tables != NULL && PyList_CheckExact(tables) && PyList_Size(tables) == 1)
        table = owned(PyList_GetItem(tables, 0));
    Py_XDECREF(tables);
    if (table != NULL && !PyList_CheckExact(table))
        Py_CLEAR(table);
    return table;
}

/* Set `full`, the number of chunks that may be stored now, and `next_offer`, at how many confirmed tokens the next one
   is full (`full_chunks`). false: left to Python. */
static bool full_chunks(const Offers *offers, Request *request)
{
    PyObject *tracked = request->tracked;
    const int64_t *numbers = request->numbers, prompt = numbers[PROMPT], all = numbers[ALL] - 1;
    const int64_t confirmed = least(numbers[COMPUTED] - numbers[PLACEHOLDERS], prompt > all ? prompt : all);
    int64_t limit;
    if (confirmed < 0 || confirmed > INT64_MAX / 2 || !get_number(tracked, N_max_store_tokens, &limit) || (request->table = table_of(tracked)) == NULL)
        return false;
    if (!is(tracked, N_prompt_only, Py_False)) {
        if (!is(tracked, N_prompt_only, Py_True))
            return false;
        limit = least(limit, prompt);
    }
    request->next_offer = confirmed < limit ? (confirmed / offers->tokens + 1) * offers->tokens : PY_SSIZE_T_MAX;
    const int64_t hashed = PyList_Size(request->hashes) / request->stride;
    const int64_t given = PyList_Size(request->table) / offers->size;
    request->full = (Py_ssize_t)least(least(confirmed, limit) / offers->tokens, least(hashed, given));
    return true;
}

/* Read a cursor of the request, and whether it has none yet. */
static bool read_cursor(Request *request, Name name, Py_ssize_t *cursor)
{
    int64_t number = 0;
    PyObject *cursors = get(request->record, name);
    bool fits = cursors != NULL && PyTuple_CheckExact(cursors);
    request->has_no_cursors = fits && PyTuple_Size(cursors) == 0;
    fits = fits && (request->has_no_cursors || read_number(only(cursors), &number));
    Py_XDECREF(cursors);
    *cursor = (Py_ssize_t)number;
    return fits;
}

/* Whether the policy has refused no key of the request, and no load has brought tokens since its last offer. */
static bool is_plain(PyObject *tracked)
{
    PyObject *refused = get(tracked, N_refused), *loaded = get(tracked, N_loaded);
    const bool plain = refused != NULL && PyAnySet_CheckExact(refused) && PySet_Size(refused) == 0 &&
                       loaded != NULL && PyObject_RichCompareBool(loaded, of.no_tokens, Py_EQ) > 0;
    Py_XDECREF(refused);
    Py_XDECREF(loaded);
    return plain;
}

/* The keys of these chunks as a list; owned. NULL without an error: Python makes them. */
static PyObject *make_keys(const Request *request, PyObject *suffix, Py_ssize_t first, Py_ssize_t last)
{
    const size_t more = (size_t)PyBytes_Size(suffix);
    PyObject *keys = PyList_New(last - first);
    for (Py_ssize_t chunk = first; keys != NULL && chunk < last; chunk++) {
        PyObject *hash = PyList_GetItem(request->hashes, (chunk + 1) * (Py_ssize_t)request->stride - 1), *key = NULL;
        const Py_ssize_t size = hash != NULL && PyBytes_CheckExact(hash) ? PyBytes_Size(hash) : -1;
        if (size >= 0 && (key = PyBytes_FromStringAndSize(NULL, size + (Py_ssize_t)more)) != NULL) {
            memcpy(PyBytes_AsString(key), PyBytes_AsString(hash), (size_t)size);
            memcpy(PyBytes_AsString(key) + size, PyBytes_AsString(suffix), more);
            PyList_SetItem(keys, chunk - first, key);
        } else
            Py_CLEAR(keys);
    }
    return keys;
}

static bool extend(PyObject *list, PyObject *more)
{
    return PyList_SetSlice(list, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, more) == 0;
}

static PyObject *range_of(Py_ssize_t first, Py_ssize_t last)
{
    PyObject *begin = PyLong_FromSsize_t(first), *end = begin == NULL ? NULL : PyLong_FromSsize_t(last), *range = NULL;
    if (end != NULL)
        range = PyObject_CallFunctionObjArgs((PyObject *)&PyRange_Type, begin, end, NULL);
    Py_XDECREF(begin);
    Py_XDECREF(end);
    return range;
}

/* Add the chunks of a request, which has some (`_add`). */
static Verdict add(const Offers *offers, const Request *request, PyObject *suffix)
{
    PyObject *const *parts = offers->parts, *again = NULL;
    const Py_ssize_t first = request->settled, last = request->full, size = (Py_ssize_t)offers->size;
    const Py_ssize_t start = PyList_Size(parts[KEYS]), before = (Py_ssize_t)least(request->offered, last);
    PyObject *keys = make_keys(request, suffix, first > 0 ? first - 1 : 0, last);
    if (keys == NULL)
        return PyErr_Occurred() ? FAILED : REFERENCE;
    PyObject *parent = first > 0 ? owned(PyList_GetItem(keys, 0)) : PyBytes_FromString("");
    PyObject *blocks = parent == NULL ? NULL : PyList_GetSlice(request->table, first * size, last * size);
    PyObject *place = blocks == NULL ? NULL : PyLong_FromSsize_t(start), *run = NULL;
    PyObject *chunks = place == NULL ? NULL : range_of(first, last);
    if (chunks != NULL)
        run = PyObject_CallFunctionObjArgs(of.chunks_made, request->tracked, python.zero, chunks, place, NULL);
    if (run != NULL && first < before)
        again = range_of(start, start + before - first);
    bool done = run != NULL && (first >= before || again != NULL) &&
                (first == 0 || PyList_SetSlice(keys, 0, 1, NULL) == 0) &&
                PyDict_SetItem(parts[PARENTS], place, parent) == 0 && extend(parts[KEYS], keys) &&
                extend(parts[BLOCKS], blocks) && PyList_Append(parts[STARTS], place) == 0 &&
                PyList_Append(parts[RUN_LIST], run) == 0;
    if (done && first < before) {
        PyObject *none = PyObject_CallMethodObjArgs(parts[OFFERED_BEFORE], name_of(N_update), again, NULL);
        done = none != NULL;
        Py_XDECREF(none);
    }
    PyObject *const objects[] = {keys, parent, blocks, place, chunks, run, again};
    let_go(objects, sizeof objects / sizeof *objects);
    return done ? FOLDED : FAILED;
}

static PyObject *later(Py_ssize_t full, Py_ssize_t cursor)
{
    PyObject *number = PyLong_FromSsize_t(full > cursor ? full : cursor);
    PyObject *cursors = number == NULL ? NULL : PyTuple_Pack(1, number);
    Py_XDECREF(number);
    return cursors;
}

/* Note the cursors that the request reaches with this batch. */
static bool note_reached(const Offers *offers, const Request *request)
{
    PyObject *settled = later(request->full, request->settled), *offered = NULL, *reached = NULL;
    if (settled != NULL)
        offered = request->settled == request->offered ? owned(settled) : later(request->full, request->offered);
    if (offered != NULL)
        reached = PyObject_CallFunctionObjArgs(of.reached_made, request->record, settled, offered, NULL);
    const bool done = reached != NULL && PyDict_SetItem(offers->parts[REACHED], request->name, reached) == 0;
    let_go((PyObject *const[]){settled, offered, reached}, 3);
    return done && (!request->has_no_cursors || PyList_Append(offers->parts[BEGUN], request->tracked) == 0);
}

static Verdict collect(const Offers *offers, Request *request)
{
    PyObject *suffix, *engines = find_record(offers, request) && is(request->tracked, N_trusted, Py_None)
                                     ? get(request->tracked, N_request)
                                     : NULL;
    Verdict verdict = engines == NULL ? REFERENCE : ask_engine(engines, NUM_NUMBERS, request->numbers);
    if (verdict == FOLDED && (request->hashes = get(engines, N_block_hashes)) == NULL)
        verdict = FAILED;
    Py_XDECREF(engines);
    if (verdict != FOLDED)
        return verdict;
    if (!PyList_CheckExact(request->hashes) || (suffix = suffix_of(request)) == NULL ||
        !full_chunks(offers, request) || !is_plain(request->tracked) ||
        !read_cursor(request, N_settled, &request->settled) || !read_cursor(request, N_offered, &request->offered))
        return REFERENCE;
    PyObject *next = PyLong_FromLongLong(request->next_offer);
    if (next == NULL)
        return FAILED;
    if (request->settled < request->full)
        verdict = add(offers, request, suffix);
    const bool moves = request->settled != request->offered || request->offered != request->full;
    if (verdict == FOLDED &&
        ((moves && !note_reached(offers, request)) || !set_attribute(request->tracked, N_next_offer, next)))
        verdict = FAILED;
    Py_DECREF(next);
    return verdict;
}

/* Collect a request, here or in Python. */
static bool collected(const Offers *offers, PyObject *batch, PyObject *tracked)
{
    Request request = {.tracked = tracked};
    const Verdict verdict = offers != NULL && is_tracked(tracked) ? collect(offers, &request) : REFERENCE;
    PyObject *const objects[] = {request.name, request.record, request.hashes, request.layout, request.table};
    let_go(objects, sizeof objects / sizeof *objects);
    if (verdict != REFERENCE)
        return verdict == FOLDED;
    PyErr_Clear();
    PyObject *none = PyObject_CallMethodObjArgs(batch, name_of(N_collect), tracked, NULL);
    Py_XDECREF(none);
    return none != NULL;
}

/* collect_due(batch, due): collect each request. */
PyObject *collect_due(PyObject *module, PyObject *arguments)
{
    (void)module;
    Offers offers = {.size = 0};
    PyObject *batch, *requests;
    if (!PyArg_ParseTuple(arguments, "OO!", &batch, &PyDict_Type, &requests))
        return NULL;
    const bool fits = offers_begin(&offers, batch);
    PyErr_Clear();
    PyObject *due = PyDict_Values(requests);
    bool done = due != NULL;
    for (Py_ssize_t one = 0; done && one < PyList_Size(due); one++)
        done = collected(fits ? &offers : NULL, batch, PyList_GetItem(due, one));
    Py_XDECREF(due);
    let_go(offers.parts, NUM_PARTS);
    Py_XDECREF(offers.records);
    return done ? owned(Py_None) : NULL;
}

/* connect_offers(OfferBatch, OfferedChunks, ReachedCursors, FULL, NO_TOKENS): take what the offers need of Python. */
PyObject *connect_offers(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct OfOffers taken;
    if (!PyArg_UnpackTuple(arguments, "connect_offers", 5, 5, &taken.offer_batch, &taken.chunks_made,
                           &taken.reached_made, &taken.full, &taken.no_tokens) ||
        !take_members(TRACKED, "kvsm.core.scheduler.tracked", "TrackedRequest"))
        return NULL;
    of = taken;
    owned(arguments); /* which has them */
    Py_RETURN_NONE;
}
