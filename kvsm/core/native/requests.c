/* Requests: they arrive, match, wait and leave (kvsm/core/ledger/requests.py). */

#include "body.h"

/* The word of a request after `trigger`; -1: its table does not allow it. */
static int32_t request_step(PyObject *request, int trigger)
{
    int64_t word;
    return get_number(request, N_word, &word) && word <= INT32_MAX ? machine_step(&REQUEST, trigger, (int32_t)word)
                                                                   : -1;
}

PyObject *named(Folding *folding, PyObject *name)
{
    PyObject *request = PyDict_GetItemWithError(field(folding, N_requests), name);
    if (request == NULL)
        PyErr_Clear();
    return request;
}

/* The record of the request that the event names, or a new one; owned. */
static PyObject *known_or_new(Folding *folding, PyObject *name)
{
    PyObject *request = named(folding, name);
    if (request != NULL) {
        Py_INCREF(request);
        return request;
    }
    return PyObject_CallFunctionObjArgs(python.request_record, name, NULL);
}

Verdict request_arrived(Folding *folding)
{
    PyObject *name = value_of(folding, N_request), *target = value_of(folding, N_target), *request = NULL;
    Verdict verdict = REFERENCE;
    if (name != NULL && PyUnicode_CheckExact(name) && target != NULL && same_text(target, python.empty_text) &&
        named(folding, name) == NULL) {
        request = PyObject_CallFunctionObjArgs(python.request_record, name, NULL);
        const bool done = request != NULL && PyDict_SetItem(field(folding, N_requests), name, request) == 0;
        verdict = done ? FOLDED : FAILED;
    }
    Py_XDECREF(name);
    Py_XDECREF(target);
    Py_XDECREF(request);
    return verdict;
}

/* The pins of a request, if no block was invalidated since: then all hold. */
bool live_pins(Folding *folding, PyObject *request, Batch *pins)
{
    int64_t since, voided_at;
    PyObject *ids = attribute_of(request, N_pins);
    bool hold = ids != NULL && batch_of(pins, ids);
    Py_XDECREF(ids);
    if (hold && pins->count > 0 &&
        !(get_number(request, N_pinned_at, &since) && field_number(folding, N_voided_at, &voided_at) &&
          voided_at < since)) {
        batch_clear(pins);
        hold = false;
    }
    return hold;
}

/* End the request's match, whose pins are `slots` and get `new_words`. */
Verdict unpin(Folding *folding, PyObject *request, const Batch *slots, int32_t *new_words)
{
    Py_ssize_t idle;
    if (!set_attribute(request, N_pins, python.no_ids))
        return FAILED;
    if (slots->count == 0)
        return FOLDED;
    commit(&folding->fold->blocks, slots, new_words);
    return come_back(folding, slots, new_words, &idle);
}

/* Check, before anything changes, that a request's match can end. pins: its pins. Returns their words without these. */
static int32_t *unpinned(Folding *folding, PyObject *request, Batch *pins)
{
    if (!may_reorder(folding, request) || !live_pins(folding, request, pins))
        return NULL;
    int32_t *new_words = next_words(folding, &folding->fold->blocks, &BLOCK, BLOCK_UNPIN, pins);
    if (new_words == NULL)
        batch_clear(pins);
    return new_words;
}

static Verdict leave(Folding *folding, int trigger)
{
    PyObject *name = value_of(folding, N_request), *request = name == NULL ? NULL : named(folding, name);
    Batch pins;
    Verdict verdict = REFERENCE;
    int32_t word, *new_words;
    Py_XDECREF(name);
    if (request == NULL || (word = request_step(request, trigger)) < 0 ||
        (new_words = unpinned(folding, request, &pins)) == NULL)
        return REFERENCE;
    Py_INCREF(request);
    verdict = unpin(folding, request, &pins, new_words);
    /* A record that is forgotten is not read any more. */
    if (verdict == FOLDED && state_of(word) != REQUEST_RELEASED &&
        (!set_attribute(request, N_patience, python.minus_one) ||
         !set_attribute(request, N_settled, python.no_ids) ||
         !set_attribute(request, N_offered, python.no_ids)))
        verdict = FAILED;
    if (verdict == FOLDED)
        verdict = settle(folding, request, word);
    batch_clear(&pins);
    Py_DECREF(request);
    return verdict;
}

Verdict request_preempted(Folding *folding) { return leave(folding, REQUEST_PREEMPT); }

Verdict request_finished(Folding *folding) { return leave(folding, REQUEST_FINISH); }

/* Pin the blocks of a match and keep it in the request's record. */
static Verdict pin(Folding *folding, PyObject *request, const Batch *slots, const int32_t *new_words)
{
    commit(&folding->fold->blocks, slots, new_words);
    if (leave_order(folding, slots, new_words) != FOLDED ||
        !set_attribute(request, N_pins, slots->object) ||
        !set_attribute(request, N_pinned_at, folding->seq_object))
        return FAILED;
    return FOLDED;
}

Verdict hit_matched(Folding *folding)
{
    PyObject *name = value_of(folding, N_request), *ids = value_of(folding, N_slots), *request = NULL;
    const Words *blocks = &folding->fold->blocks;
    Batch slots;
    Verdict verdict = REFERENCE;
    if (name == NULL || !PyUnicode_CheckExact(name) || !batch_of(&slots, ids))
        goto end;
    request = known_or_new(folding, name);
    if (request == NULL) {
        verdict = FAILED;
    } else {
        const int32_t word = request_step(request, slots.count ? REQUEST_HIT : REQUEST_MISS);
        int32_t *new_words = NULL;
        if (word >= 0 && may_reorder(folding, request) &&
            (new_words = next_words(folding, blocks, &BLOCK, BLOCK_PIN, &slots)) != NULL &&
            are_distinct(folding, &slots, blocks->size)) {
            verdict = slots.count ? pin(folding, request, &slots, new_words) : FOLDED;
            if (verdict == FOLDED && (!set_number(request, N_word, word) ||
                                      PyDict_SetItem(field(folding, N_requests), name, request) < 0))
                verdict = FAILED;
        }
    }
    batch_clear(&slots);
end:
    Py_XDECREF(name);
    Py_XDECREF(ids);
    Py_XDECREF(request);
    return verdict;
}

Verdict request_admitted(Folding *folding)
{
    PyObject *name = value_of(folding, N_request), *request = name == NULL ? NULL : named(folding, name);
    Py_XDECREF(name);
    return request == NULL ? REFERENCE : FOLDED;
}

Verdict hit_released(Folding *folding)
{
    PyObject *name = value_of(folding, N_request), *request = name == NULL ? NULL : named(folding, name);
    Batch pins;
    int32_t word, *new_words;
    Py_XDECREF(name);
    if (request == NULL || (word = request_step(request, REQUEST_UNMATCH)) < 0 ||
        (new_words = unpinned(folding, request, &pins)) == NULL)
        return REFERENCE;
    Py_INCREF(request);
    Verdict verdict = unpin(folding, request, &pins, new_words);
    if (verdict == FOLDED && !set_number(request, N_word, word))
        verdict = FAILED;
    batch_clear(&pins);
    Py_DECREF(request);
    return verdict;
}

Verdict request_deferred(Folding *folding)
{
    PyObject *name = value_of(folding, N_request), *transfer = value_of(folding, N_transfer);
    PyObject *until = value_of(folding, N_until), *request = NULL;
    Verdict verdict = REFERENCE;
    int32_t word;
    if (name == NULL || !PyUnicode_CheckExact(name) || transfer == NULL || until == NULL ||
        PyDict_GetItemWithError(field(folding, N_transfers), transfer) == NULL) {
        PyErr_Clear();
        goto end;
    }
    request = known_or_new(folding, name);
    if (request == NULL)
        verdict = FAILED;
    else if ((word = request_step(request, REQUEST_DEFER)) >= 0) {
        const bool done = set_number(request, N_word, word) &&
                          set_attribute(request, N_awaits, transfer) &&
                          set_attribute(request, N_patience, until) &&
                          PyDict_SetItem(field(folding, N_requests), name, request) == 0 &&
                          PyDict_SetItem(field(folding, N_deferred), name, request) == 0;
        verdict = done ? FOLDED : FAILED;
    }
end:
    Py_XDECREF(name);
    Py_XDECREF(transfer);
    Py_XDECREF(until);
    Py_XDECREF(request);
    return verdict;
}

/* While requests wait, Python looks whose patience ends. */
Verdict ticked(Folding *folding)
{
    PyObject *tick = value_of(folding, N_tick);
    int64_t now, before;
    Verdict verdict = REFERENCE;
    if (read_number(tick, &now) && field_number(folding, N_tick, &before) && now == before + 1 &&
        is_empty(field(folding, N_deferred)))
        verdict = set_field(folding, N_tick, tick) ? FOLDED : FAILED;
    Py_XDECREF(tick);
    return verdict;
}

Verdict settle(Folding *folding, PyObject *request, int32_t word)
{
    const int state = state_of(word);
    PyObject *deferred = field(folding, N_deferred);
    Verdict verdict = FOLDED;
    if (!set_number(request, N_word, word))
        return FAILED;
    const bool waited = state != REQUEST_DEFERRED && !is_empty(deferred);
    if (!waited && state != REQUEST_RELEASED)
        return FOLDED;
    PyObject *name = attribute_of(request, N_name);
    if (name == NULL)
        return FAILED;
    if (waited && PyDict_GetItemWithError(deferred, name) != NULL && PyDict_DelItem(deferred, name) < 0)
        verdict = FAILED;
    if (state == REQUEST_RELEASED && PyDict_DelItem(field(folding, N_requests), name) < 0)
        verdict = FAILED;
    Py_DECREF(name);
    return verdict;
}

/* Wake the requests that wait for this transfer. */
Verdict wake_waiting(Folding *folding, int64_t transfer)
{
    PyObject *deferred = field(folding, N_deferred);
    if (is_empty(deferred))
        return FOLDED;
    PyObject *requests = PyDict_Values(deferred);
    if (requests == NULL)
        return FAILED;
    Verdict verdict = FOLDED;
    for (Py_ssize_t one = 0; verdict == FOLDED && one < PyList_Size(requests); one++) {
        PyObject *request = PyList_GetItem(requests, one);
        int64_t awaits;
        if (!get_number(request, N_awaits, &awaits))
            verdict = FAILED;
        else if (awaits == transfer)
            /* The table has WAKE for every request that is DEFERRED. */
            verdict = settle(folding, request, request_step(request, REQUEST_WAKE));
    }
    Py_DECREF(requests);
    return verdict;
}
