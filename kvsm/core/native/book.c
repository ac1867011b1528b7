/* What the second book does at each kind of event (kvsm/explain/verify/book.py): what is common and breaks nothing. */

#include "witness.h"

/* -------------------------------------------------------------------------------- dicts, sets, records */

bool drop(PyObject *dict, PyObject *key)
{
    const int has = PyDict_Contains(dict, key);
    return has == 0 || (has > 0 && PyDict_DelItem(dict, key) == 0);
}

/* Whether a set has none of these. */
static bool has_none(PyObject *set, PyObject *ids)
{
    if (PySet_Size(set) == 0)
        return true;
    PyObject *disjoint = PyObject_CallMethod(set, "isdisjoint", "O", ids);
    PyErr_Clear();
    Py_XDECREF(disjoint);
    return disjoint == Py_True;
}

/* ---------------------------------------------------------------------------------------- the book */

static Verdict changes_nothing(Following *following)
{
    (void)following;
    return FOLDED;
}

void replace(PyObject **attribute, PyObject *value)
{
    PyObject *before = *attribute;
    Py_INCREF(value);
    *attribute = value;
    Py_XDECREF(before);
}

/* While requests wait, Python looks who wakes. */
static Verdict note_tick(Following *following)
{
    PyObject *tick = event_field(following, N_tick);
    if (tick == NULL || PyDict_Size(following->book->waits) > 0) {
        Py_XDECREF(tick);
        return REFERENCE;
    }
    replace(&following->book->tick, tick);
    Py_DECREF(tick);
    return FOLDED;
}

/* Read the name of the event's request. */
static bool name_request(Following *following)
{
    following->name = event_field(following, N_request);
    return following->name != NULL && PyUnicode_CheckExact(following->name);
}

static Verdict deferred(Following *following)
{
    PyObject *transfer = event_field(following, N_transfer), *until = event_field(following, N_until);
    PyObject *wait = transfer == NULL || until == NULL ? NULL : PyTuple_Pack(2, transfer, until);
    Verdict verdict = REFERENCE;
    if (wait != NULL && name_request(following))
        verdict = PyDict_SetItem(following->book->waits, following->name, wait) == 0 ? FOLDED : FAILED;
    Py_XDECREF(transfer);
    Py_XDECREF(until);
    Py_XDECREF(wait);
    return verdict;
}

static Verdict matched(Following *following)
{
    Book *book = following->book;
    PyObject *slots = NULL, *match = NULL;
    Verdict verdict = REFERENCE;
    if (!name_request(following) || !slots_of(following, &slots))
        goto end;
    if (book->now_slots.count > 0) {
        if (PyDict_Contains(book->matches, following->name) || !all_are_readable(book))
            goto end;
        match = PyTuple_Pack(2, following->seq_object, slots);
        if (match == NULL || PyDict_SetItem(book->matches, following->name, match) < 0) {
            verdict = FAILED;
            goto end;
        }
    }
    verdict = FOLDED;
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++)
        if (!recount(book, book->now_slots.ids[one], IDLE_ENTRY, PINNED, 0, 1))
            verdict = FAILED;
end:
    Py_XDECREF(slots);
    Py_XDECREF(match);
    return verdict;
}

/* The match that the request holds; borrowed. NULL: it holds none. If it `fits`, all its pins hold, and are read. */
static PyObject *match_of(Following *following, bool *fits)
{
    Book *book = following->book;
    PyObject *match = PyDict_GetItemWithError(book->matches, following->name);
    int64_t since, voided;
    *fits = match == NULL
                ? !PyErr_Occurred()
                : PyTuple_CheckExact(match) && PyTuple_Size(match) == 2 && read_number(PyTuple_GetItem(match, 0), &since) &&
                      read_number(book->last_void, &voided) && voided <= since &&
                      read_ids(PyTuple_GetItem(match, 1), &book->now_slots, PyList_Size(book->slots)) &&
                      all_are_pinned(book);
    PyErr_Clear();
    return match;
}

static Verdict end_pins(Book *book, Py_ssize_t first)
{
    for (Py_ssize_t one = first; one < book->now_slots.count; one++)
        if (!recount(book, book->now_slots.ids[one], PINNED, IDLE_ENTRY, 0, -1))
            return FAILED;
    return FOLDED;
}

static Verdict unmatched(Following *following)
{
    Book *book = following->book;
    bool fits = false;
    PyObject *match = name_request(following) ? match_of(following, &fits) : NULL;
    if (!fits)
        return REFERENCE;
    if (match == NULL)
        return FOLDED;
    return PyDict_DelItem(book->matches, following->name) < 0 ? FAILED : end_pins(book, 0);
}

static Verdict left(Following *following)
{
    Book *book = following->book;
    const Verdict verdict = unmatched(following);
    if (verdict != FOLDED)
        return verdict;
    following->restarts = true;
    const bool done = drop(book->cursors, following->name) && drop(book->waits, following->name) &&
                      PySet_Discard(book->may_go_back, following->name) >= 0;
    return done ? FOLDED : FAILED;
}

/* Whether each number of `least` is at most the one of `most` at its place, and both have equally many. */
static bool at_most(PyObject *least, PyObject *most)
{
    int64_t low, high;
    if (least == most)
        return true;
    if (least == NULL || most == NULL || !PyTuple_CheckExact(least) || !PyTuple_CheckExact(most) || PyTuple_Size(least) != PyTuple_Size(most))
        return false;
    for (Py_ssize_t group = 0; group < PyTuple_Size(least); group++)
        if (!read_number(PyTuple_GetItem(least, group), &low) ||
            !read_number(PyTuple_GetItem(most, group), &high) || low > high)
            return false;
    return true;
}

static bool may_offer(const Book *book, PyObject *offer)
{
    if (!PyTuple_CheckExact(offer) || PyTuple_Size(offer) != 3 || !PyTuple_CheckExact(PyTuple_GetItem(offer, 1)))
        return false;
    PyObject *settled = PyTuple_GetItem(offer, 1), *offered = PyTuple_GetItem(offer, 2);
    PyObject *had = PyDict_GetItemWithError(book->cursors, PyTuple_GetItem(offer, 0));
    PyErr_Clear();
    return at_most(settled, offered) &&
           (had == NULL ||
            (PyTuple_CheckExact(had) && PyTuple_Size(had) == 2 && at_most(PyTuple_GetItem(had, 0), settled) && at_most(PyTuple_GetItem(had, 1), offered)));
}

/* Whether no request is named twice. */
static bool are_of_different_requests(PyObject *offers)
{
    const Py_ssize_t count = PyTuple_Size(offers);
    if (count < 2)
        return true;
    PyObject *names = PySet_New(NULL);
    for (Py_ssize_t one = 0; names != NULL && one < count; one++)
        if (PySet_Add(names, PyTuple_GetItem(PyTuple_GetItem(offers, one), 0)) < 0)
            Py_CLEAR(names);
    const bool differ = names != NULL && PySet_Size(names) == count;
    PyErr_Clear();
    Py_XDECREF(names);
    return differ;
}

static Verdict offered(Following *following)
{
    Book *book = following->book;
    PyObject *offers = event_field(following, N_offers);
    Verdict verdict = REFERENCE;
    const Py_ssize_t count = offers != NULL && PyTuple_CheckExact(offers) ? PyTuple_Size(offers) : -1;
    bool fits = count >= 0;
    for (Py_ssize_t one = 0; fits && one < count; one++)
        fits = may_offer(book, PyTuple_GetItem(offers, one));
    if (fits && are_of_different_requests(offers)) {
        verdict = FOLDED;
        for (Py_ssize_t one = 0; verdict == FOLDED && one < count; one++) {
            PyObject *offer = PyTuple_GetItem(offers, one), *name = PyTuple_GetItem(offer, 0);
            PyObject *cursors = PyTuple_Pack(2, PyTuple_GetItem(offer, 1), PyTuple_GetItem(offer, 2));
            if (cursors == NULL || PyDict_SetItem(book->cursors, name, cursors) < 0 ||
                PySet_Discard(book->may_go_back, name) < 0)
                verdict = FAILED;
            Py_XDECREF(cursors);
        }
        Py_INCREF(offers);
        following->offers = offers;
    }
    Py_XDECREF(offers);
    return verdict;
}

PyObject *keys_of(const Book *book)
{
    PyObject *keys = PyList_New(book->now_slots.count);
    for (Py_ssize_t one = 0; keys != NULL && one < book->now_slots.count; one++)
        put(keys, one, at(book->keys, book->now_slots.ids[one]));
    return keys;
}

bool tell(Following *following, bool removed, PyObject *keys)
{
    PyObject *told = keys == NULL ? NULL : PyTuple_Pack(2, removed ? Py_True : Py_False, keys);
    const bool done = told != NULL && PyList_Append(following->told, told) == 0;
    Py_XDECREF(told);
    return done;
}

static Verdict evicted(Following *following)
{
    Book *book = following->book;
    const Ids *slots = &book->now_slots;
    if (!slots_of(following, NULL) || !all_are(book->slots, slots, slot_entry(IDLE_ENTRY)))
        return REFERENCE;
    put_all(book->slots, slots, slot_entry(GONE));
    following->keys = keys_of(book);
    if (!tell(following, true, following->keys))
        return FAILED;
    for (Py_ssize_t one = 0; one < slots->count; one++)
        if (!drop(book->held, at(following->keys, one)))
            return FAILED;
    book->idle -= slots->count;
    book->free += slots->count;
    replace(&book->last_loss, following->seq_object);
    return FOLDED;
}

/* Keep a transfer in the book. */
static Verdict keep(Following *following, PyObject *store, PyObject *slots, PyObject *blocks, PyObject *request)
{
    PyObject *booked = PyObject_CallFunctionObjArgs(books.booked_transfer, store, slots, blocks, request, NULL);
    const bool done =
        booked != NULL && PyDict_SetItem(following->book->transfers, following->seq_object, booked) == 0;
    Py_XDECREF(booked);
    Py_INCREF(following->seq_object);
    following->transfer = following->seq_object;
    return done ? FOLDED : FAILED;
}

/* Hold these keys in these slots. REFERENCE: one is held already, or twice among them; then nothing has changed. */
static Verdict hold(Book *book, PyObject *keys)
{
    const Ids *slots = &book->now_slots;
    const Py_ssize_t expected = PyDict_Size(book->held) + slots->count;
    for (Py_ssize_t one = 0; one < slots->count; one++)
        if (PyDict_Contains(book->held, PyTuple_GetItem(keys, one))) {
            PyErr_Clear();
            return REFERENCE;
        }
    for (Py_ssize_t one = 0; one < slots->count; one++) {
        PyObject *slot = PyLong_FromLongLong(slots->ids[one]);
        const bool done = slot != NULL && PyDict_SetItem(book->held, PyTuple_GetItem(keys, one), slot) == 0;
        Py_XDECREF(slot);
        if (!done)
            return FAILED;
    }
    if (PyDict_Size(book->held) == expected)
        return FOLDED;
    for (Py_ssize_t one = 0; one < slots->count; one++)
        if (!drop(book->held, PyTuple_GetItem(keys, one)))
            return FAILED;
    return REFERENCE;
}

static bool are_unused(const Book *book)
{
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++) {
        PyObject *entry = at(book->slots, book->now_slots.ids[one]);
        if (!same(entry, slot_entry(GONE)) && !same(entry, slot_entry(FREE_ENTRY)))
            return false;
    }
    return true;
}

/* These slots hold new blocks: nothing is wrong with them any more. */
static bool forget_what_spoiled(Book *book)
{
    for (Py_ssize_t one = 0; PyDict_Size(book->spoiled) > 0 && one < book->now_slots.count; one++) {
        PyObject *slot = PyLong_FromLongLong(book->now_slots.ids[one]);
        const bool done = slot != NULL && drop(book->spoiled, slot);
        Py_XDECREF(slot);
        if (!done)
            return false;
    }
    return true;
}

static Verdict store_plan(Following *following)
{
    Book *book = following->book;
    PyObject *keys = event_field(following, N_keys), *slots = NULL, *blocks = NULL;
    Verdict verdict = REFERENCE;
    if (keys == NULL || !PyTuple_CheckExact(keys) || !slots_of(following, &slots) || !blocks_of(following, &blocks) ||
        PyTuple_Size(keys) != book->now_slots.count || !are_unused(book) ||
        !all_are(book->leases, &book->now_blocks, lease_entry(UNLEASED)) || !has_none(book->older, blocks) ||
        (verdict = hold(book, keys)) != FOLDED)
        goto end;
    Py_INCREF(keys);
    following->keys = keys;
    put_all(book->slots, &book->now_slots, slot_entry(PLANNED));
    put_all(book->leases, &book->now_blocks, lease_entry(READ_ONCE));
    for (Py_ssize_t one = 0; one < book->now_slots.count; one++)
        put(book->keys, book->now_slots.ids[one], PyTuple_GetItem(keys, one));
    book->free -= book->now_slots.count;
    verdict = forget_what_spoiled(book) ? keep(following, Py_True, slots, blocks, NULL) : FAILED;
end:
    Py_XDECREF(keys);
    Py_XDECREF(slots);
    Py_XDECREF(blocks);
    return verdict;
}

/* These device blocks will hold the keys of these slots, all of each slot's chunk. */
static bool bring(Book *book)
{
    for (Py_ssize_t one = 0; one < book->now_blocks.count; one++) {
        PyObject *block = PyLong_FromLongLong(book->now_blocks.ids[one]);
        const int64_t slot = book->named.ids[one / (Py_ssize_t)book->chunk];
        const bool done = block != NULL && PyDict_SetItem(book->brought, block, at(book->keys, slot)) == 0 &&
                          PySet_Discard(book->older, block) >= 0;
        Py_XDECREF(block);
        if (!done)
            return false;
    }
    return true;
}

/* Lease the device blocks that the event touches to a load. false, and nothing is changed: one is leased, or twice
   among them. */
static bool lease_for_load(Book *book)
{
    const Ids *blocks = &book->now_blocks;
    Py_ssize_t leased = 0;
    while (leased < blocks->count && same(at(book->leases, blocks->ids[leased]), lease_entry(UNLEASED)))
        put(book->leases, blocks->ids[leased++], lease_entry(WRITTEN));
    if (leased == blocks->count)
        return true;
    while (leased > 0)
        put(book->leases, blocks->ids[--leased], lease_entry(UNLEASED));
    return false;
}

/* Whether a load takes the first pins of its request's match, and nothing that is rare. Then the pins are read, and
   the device blocks leased. */
static bool may_load(Following *following)
{
    Book *book = following->book;
    PyObject *parts = event_field(following, N_parts), *voided = event_field(following, N_voided);
    bool fits = parts != NULL && PyTuple_CheckExact(parts) && PyTuple_Size(parts) == 0 && voided == Py_False;
    Py_XDECREF(parts);
    Py_XDECREF(voided);
    PyObject *match = fits ? match_of(following, &fits) : NULL;
    const Py_ssize_t loaded = book->named.count;
    return fits && match != NULL && loaded > 0 && loaded <= book->now_slots.count &&
           memcmp(book->named.ids, book->now_slots.ids, (size_t)loaded * sizeof(int64_t)) == 0 &&
           book->now_blocks.count % book->chunk == 0 && book->now_blocks.count / book->chunk == loaded &&
           lease_for_load(book);
}

static Verdict load_plan(Following *following)
{
    Book *book = following->book;
    PyObject *slots = NULL, *blocks = NULL;
    Verdict verdict = REFERENCE;
    if (!name_request(following) ||
        !ids_of(following, N_slots, &book->named, PyList_Size(book->slots), &slots) ||
        !blocks_of(following, &blocks) || !may_load(following))
        goto end;
    verdict = PyDict_DelItem(book->matches, following->name) < 0 ? FAILED : end_pins(book, book->named.count);
    for (Py_ssize_t one = 0; verdict == FOLDED && one < book->named.count; one++)
        if (!recount(book, book->named.ids[one], PINNED, READ, 1, -1))
            verdict = FAILED;
    if (verdict == FOLDED && (!bring(book) || PyDict_SetItem(book->loads, following->name, following->seq_object) < 0))
        verdict = FAILED;
    if (verdict == FOLDED)
        verdict = keep(following, Py_False, slots, blocks, following->name);
    following->brings = true;
end:
    Py_XDECREF(slots);
    Py_XDECREF(blocks);
    return verdict;
}

static Verdict touched(Following *following)
{
    return slots_of(following, NULL) && all_are_readable(following->book) ? FOLDED : REFERENCE;
}

typedef Verdict (*Follower)(Following *);

/* Kinds without a follower here are left to Python. */
static const Follower followers[NUM_KINDS] = {
    [KIND_LogOpened] = changes_nothing,
    [KIND_RequestArrived] = changes_nothing,
    [KIND_RequestPreempted] = left,
    [KIND_RequestFinished] = left,
    [KIND_HitMatched] = matched,
    [KIND_HitReleased] = unmatched,
    [KIND_RequestDeferred] = deferred,
    [KIND_KeysRecalled] = changes_nothing,
    [KIND_BlocksEvicted] = evicted,
    [KIND_StorePlanned] = store_plan,
    [KIND_StoreSkipped] = changes_nothing,
    [KIND_LoadPlanned] = load_plan,
    [KIND_TransfersSubmitted] = submitted,
    [KIND_WorkerReported] = reported,
    [KIND_BlocksTouched] = touched,
    [KIND_FlushRequested] = changes_nothing,
    [KIND_StepEnded] = changes_nothing,
    [KIND_Ticked] = note_tick,
    [KIND_BlocksOffered] = offered,
    [KIND_RequestAdmitted] = changes_nothing,
};

Verdict follow(Following *following)
{
    following->book->now_slots.count = following->book->now_blocks.count = 0;
    if (following->kind < 0 || followers[following->kind] == NULL)
        return REFERENCE;
    const Verdict verdict = followers[following->kind](following);
    if (verdict == REFERENCE)
        PyErr_Clear();
    return verdict;
}

void following_clear(Following *following)
{
    Py_CLEAR(following->transfer);
    following->brings = following->restarts = false;
    Py_CLEAR(following->offers);
    Py_CLEAR(following->name);
    Py_CLEAR(following->keys);
}

bool book_is_known(const Book *book)
{
    PyObject *const lists[] = {book->slots, book->leases, book->keys};
    PyObject *const dicts[] = {book->held, book->transfers, book->matches, book->loads,
                               book->waits, book->spoiled, book->brought, book->cursors};
    for (size_t one = 0; one < sizeof lists / sizeof *lists; one++)
        if (lists[one] == NULL || !PyList_CheckExact(lists[one]))
            return false;
    for (size_t one = 0; one < sizeof dicts / sizeof *dicts; one++)
        if (dicts[one] == NULL || !PyDict_CheckExact(dicts[one]))
            return false;
    return book->older != NULL && PySet_Check(book->older) && book->may_go_back != NULL &&
           PySet_Check(book->may_go_back) && book->offers != NULL && PyDict_Check(book->offers) &&
           book->tick != NULL && book->last_void != NULL && book->last_end != NULL && book->last_loss != NULL &&
           PyList_Size(book->slots) == PyList_Size(book->keys) && book->chunk > 0;
}
