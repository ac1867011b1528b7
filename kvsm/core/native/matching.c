/* Hits on the host: matches, pins and what ends them (kvsm/core/offloader/matching.py). */

#include "calls.h"

/* ----------------------------------------------------------------------------- what the arguments say */

/* Whether this may be given as `missed`: a key, or None. */
static bool is_missed(PyObject *key) { return key == Py_None || is_key(key); }

/* Whether each of these counts of blocks is a number or None (`_checked_lookup`). */
static bool are_counts(PyObject *const *counts, Py_ssize_t given)
{
    int64_t number;
    for (Py_ssize_t one = 0; one < given; one++)
        if (counts[one] != Py_None && !read_number(counts[one], &number))
            return false;
    return true;
}

/* The slots that a call names, in the ledger's form (`_checked_slots`). */
static bool checked_slots(Call *call, PyObject *given, Batch *slots)
{
    PyObject *ids = PyList_CheckExact(given) ? PyList_AsTuple(given) : owned(given);
    int64_t limit;
    const bool read = slots_of(slots, ids);
    bool fit = read && configured(call, N_host_blocks, &limit) && (slots->buffer.obj == NULL || slots->buffer.ndim == 1);
    for (Py_ssize_t one = 0; fit && one < slots->count; one++)
        fit = slots->ids[one] >= 0 && slots->ids[one] < limit;
    if (read && !fit)
        batch_clear(slots);
    Py_XDECREF(ids);
    return fit;
}

/* Set to the state of this request; REQUEST_NEW without a record. false: Python takes the call. */
static bool state_of_request(Call *call, PyObject *request, int *state)
{
    PyObject *record;
    int64_t word = 0;
    const bool fits = known(call, request, &record) && (record == NULL || get_number(record, N_word, &word));
    Py_XDECREF(record);
    *state = state_of((int32_t)word);
    return fits;
}

/* -------------------------------------------------------------------------------------------- pins */

/* Whether the request holds nothing, and may hold the slots now: it may not if one is being stored. A request
   without an entry is new. */
static bool may_pin(Call *call, PyObject *request, const Batch *slots, int *state)
{
    Folding *look = &call->look;
    PyObject *record;
    int64_t load = 0, word = 0;
    const bool fits = known(call, request, &record) &&
                      (record == NULL || (get_number(record, N_load, &load) && get_number(record, N_word, &word)));
    Py_XDECREF(record);
    if (!fits)
        return false;
    *state = state_of((int32_t)word);
    const bool holds_nothing = *state == REQUEST_NEW || *state == REQUEST_RUNNING || *state == REQUEST_PREEMPTED;
    return load == 0 && holds_nothing && next_words(look, &look->fold->blocks, &BLOCK, BLOCK_PIN, slots) != NULL &&
           are_distinct(look, slots, look->fold->blocks.size);
}

/* Whether the request's match has exactly these pins, and all of them are still valid. */
static bool holds(Call *call, PyObject *request, const Batch *slots)
{
    PyObject *record;
    Batch pins;
    int64_t word;
    bool same = known(call, request, &record) && record != NULL && get_number(record, N_word, &word) &&
                state_of((int32_t)word) == REQUEST_MATCHED && live_pins(&call->look, record, &pins);
    Py_XDECREF(record);
    if (!same)
        return false;
    same = pins.count == slots->count &&
           memcmp(pins.ids, slots->ids, (size_t)pins.count * sizeof *pins.ids) == 0;
    batch_clear(&pins);
    return same;
}

/* Raise in Python what stands for this refusal of the ledger. A clock that uses the core can bring it about. */
static void refuse_pin(PyObject *request)
{
    PyObject *kind, *refusal, *trace;
    PyErr_Fetch(&kind, &refusal, &trace);
    PyErr_NormalizeException(&kind, &refusal, &trace);
    Py_XDECREF(PyObject_CallFunctionObjArgs(of_python.cannot_pin, request, refusal, NULL));
    Py_XDECREF(kind);
    Py_XDECREF(refusal);
    Py_XDECREF(trace);
}

/* Pin the slots for the request, unless that changes nothing (`_pin`). others: the other fields of `HitMatched`. */
static Verdict pin_slots(Call *call, PyObject *request, const Batch *slots, PyObject *const others[4])
{
    int state;
    if (holds(call, request, slots))
        return returns_none(call);
    if (!may_pin(call, request, slots, &state))
        return REFERENCE;
    if (state == REQUEST_RUNNING && slots->count == 0)
        return returns_none(call);
    const bool is_tuple = slots->object != NULL && PyTuple_CheckExact(slots->object);
    PyObject *ids = is_tuple ? owned(slots->object) : packed(slots->ids, slots->count);
    PyObject *const values[] = {request, ids, others[0], others[1], others[2], others[3]};
    const Verdict verdict = ids == NULL ? REFERENCE : emitted_alone(call, KIND_HitMatched, values, 6);
    Py_XDECREF(ids);
    if (verdict == FAILED && PyErr_ExceptionMatches(of_python.illegal_transition))
        refuse_pin(request);
    return verdict;
}

Verdict pin(Call *call)
{
    PyObject *const *given = call->arguments;
    PyObject *others[4] = {NULL, Py_None, Py_None, Py_None};
    Batch slots;
    if (call->names != NULL || call->count < 3 || call->count > 6 || !is_name(given[0]) || !is_missed(given[2]) ||
        !are_counts(given + 3, call->count - 3) || !call->folds || !see_state(&call->look) ||
        !checked_slots(call, given[1], &slots))
        return REFERENCE;
    for (Py_ssize_t one = 2; one < call->count; one++)
        others[one - 2] = given[one];
    const Verdict verdict = pin_slots(call, given[0], &slots, others);
    batch_clear(&slots);
    return verdict;
}

/* ------------------------------------------------------------------------------------------- match */

/* The slots of the longest prefix of keys that is readable on the host (`_readable_prefix`). missed: the first key
   behind this prefix; borrowed. REFERENCE: an object is no key. */
static Verdict readable_prefix(Call *call, PyObject *keys, Numbers *slots, PyObject **missed)
{
    const KeyIndex *index = index_of(&call->look);
    const bool is_list = PyList_CheckExact(keys);
    const Py_ssize_t count = is_list ? PyList_Size(keys) : PyTuple_Size(keys);
    *missed = Py_None;
    for (Py_ssize_t one = 0; one < count; one++) {
        PyObject *key = is_list ? PyList_GetItem(keys, one) : PyTuple_GetItem(keys, one);
        if (!PyBytes_CheckExact(key))
            return REFERENCE;
        const int64_t slot = index_find(index, key);
        if (slot == -1) {
            *missed = key;
            return PyBytes_Size(key) <= PyLong_AsSsize_t(of_python.key_bytes_max) ? FOLDED : REFERENCE;
        }
        if (slot < 0)
            return REFERENCE;
        numbers_add(slots, slot);
    }
    return FOLDED;
}

/* Note the last key of the match: the next store of the request may continue from it. */
static bool note_last(Call *call, PyObject *request, PyObject *keys, Py_ssize_t hits)
{
    PyObject *last_keys = of_core(call, N_last_keys), *key = NULL;
    if (last_keys != NULL)
        key = PySequence_GetItem(keys, hits - 1);
    const bool done = key != NULL && PyDict_SetItem(last_keys, request, key) == 0;
    Py_XDECREF(last_keys);
    Py_XDECREF(key);
    return done;
}

/* Pin a prefix of `count` keys for the request. */
static Verdict pin_prefix(Call *call, PyObject *request, const Batch *slots, PyObject *missed, int64_t count, int64_t chunk)
{
    PyObject *all = PyLong_FromLongLong(count * chunk), *here = PyLong_FromLongLong(slots->count * chunk);
    PyObject *const others[] = {missed, all, Py_None, here};
    const Verdict verdict = all == NULL || here == NULL ? REFERENCE : pin_slots(call, request, slots, others);
    Py_XDECREF(all);
    Py_XDECREF(here);
    return verdict;
}

static Verdict match_prefix(Call *call, PyObject *request, PyObject *keys, Numbers *prefix)
{
    const Py_ssize_t count = PyObject_Size(keys);
    const Batch *slots = &prefix->batch;
    PyObject *missed;
    int64_t chunk;
    if (!configured(call, N_blocks_per_chunk, &chunk) || readable_prefix(call, keys, prefix, &missed) != FOLDED)
        return REFERENCE;
    Py_INCREF(missed); /* the caller may drop this key while the clock runs */
    const Verdict verdict = pin_prefix(call, request, slots, missed, count, chunk);
    Py_DECREF(missed);
    if (verdict != FOLDED)
        return verdict;
    Py_CLEAR(call->result);
    if (slots->count > 0 && !note_last(call, request, keys, slots->count))
        return FAILED;
    PyObject *hits = PyLong_FromSsize_t(slots->count);
    call->result = hits == NULL ? NULL : PyObject_CallFunctionObjArgs(of_python.match_made, hits, NULL);
    Py_XDECREF(hits);
    return call->result == NULL ? FAILED : FOLDED;
}

Verdict match(Call *call)
{
    PyObject *const *given = call->arguments;
    Numbers prefix;
    if (call->names != NULL || call->count != 2 || !is_name(given[0]) ||
        !(PyList_CheckExact(given[1]) || PyTuple_CheckExact(given[1])) ||
        !call->folds || !see_state(&call->look))
        return REFERENCE;
    if (!numbers_begin(&prefix, PyObject_Size(given[1])))
        return FAILED;
    const Verdict verdict = match_prefix(call, given[0], given[1], &prefix);
    numbers_end(&prefix);
    return verdict;
}

/* ------------------------------------------------------------------ what a request waits for, and its end */

/* Whether the only argument is the name of a request. */
static bool names_request(const Call *call)
{
    return call->names == NULL && call->count == 1 && is_name(call->arguments[0]);
}

/* Left to Python: a preempted request whose load is in flight. */
Verdict waits_for(Call *call)
{
    PyObject *record;
    int64_t word = 0, load = 0;
    if (!names_request(call) || !known(call, call->arguments[0], &record))
        return REFERENCE;
    const bool fits = record == NULL || (get_number(record, N_word, &word) && get_number(record, N_load, &load));
    const int state = state_of((int32_t)word);
    if (fits && state == REQUEST_DEFERRED)
        call->result = attribute_of(record, N_awaits);
    else if (fits && (load == 0 || state == REQUEST_LOADING || state == REQUEST_FINISHED))
        call->result = owned(Py_None);
    Py_XDECREF(record);
    return call->result == NULL ? REFERENCE : FOLDED;
}

Verdict may_match(Call *call)
{
    PyObject *record;
    int64_t load = 0;
    if (!names_request(call) || !known(call, call->arguments[0], &record))
        return REFERENCE;
    if (record == NULL || get_number(record, N_load, &load))
        call->result = PyBool_FromLong(load == 0);
    Py_XDECREF(record);
    return call->result == NULL ? REFERENCE : FOLDED;
}

Verdict admit_request(Call *call)
{
    PyObject *values[6] = {NULL, Py_None, Py_None, Py_None, Py_None, Py_False}, *record;
    if (call->names != NULL || call->count < 1 || call->count > 6 || !is_name(call->arguments[0]))
        return REFERENCE;
    for (Py_ssize_t one = 0; one < call->count; one++)
        values[one] = call->arguments[one];
    if (!are_counts(values + 1, 3) || !is_missed(values[4]) || !PyBool_Check(values[5]) ||
        !known(call, values[0], &record))
        return REFERENCE;
    const bool is_known = record != NULL;
    Py_XDECREF(record);
    return is_known ? emitted_alone(call, KIND_RequestAdmitted, values, 6) : returns_none(call);
}

Verdict release(Call *call)
{
    int state;
    if (!names_request(call) || !state_of_request(call, call->arguments[0], &state))
        return REFERENCE;
    return state == REQUEST_MATCHED ? emitted_alone(call, KIND_HitReleased, call->arguments, 1) : returns_none(call);
}
