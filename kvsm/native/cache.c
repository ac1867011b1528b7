/* The cache as a whole: blocks used in passing, and the reset (kvsm/ledger/cache.py). */

#include "body.h"

Verdict blocks_touched(Folding *folding)
{
    PyObject *ids = PyObject_GetAttr(folding->event, name_of(N_slots));
    const Words *blocks = &folding->fold->blocks;
    Batch slots;
    Verdict verdict = REFERENCE;
    if (may_reorder(folding, NULL) && batch_of(&slots, ids)) {
        const int32_t *new_words = next_words(folding, blocks, &BLOCK, BLOCK_TOUCH, &slots);
        if (new_words != NULL && are_distinct(folding, &slots, blocks->size))
            verdict = touch(folding, &slots, new_words);
        batch_clear(&slots);
    }
    Py_XDECREF(ids);
    return verdict;
}

/* Abandon all transfers, or only see whether that is allowed: it is not while one is only planned. */
static Verdict abandon_all(Folding *folding, bool only_look)
{
    PyObject *transfers = PyDict_Values(field(folding, N_transfers));
    Verdict verdict = transfers == NULL ? FAILED : FOLDED;
    for (Py_ssize_t one = 0; verdict == FOLDED && one < PyList_Size(transfers); one++) {
        PyObject *transfer = PyList_GetItem(transfers, one);
        int64_t word;
        int32_t after;
        if (!get_number(transfer, N_word, &word) ||
            (after = machine_step(&TRANSFER, TRANSFER_ABANDON, (int32_t)word)) < 0)
            verdict = REFERENCE;
        else if (!only_look && !set_number(transfer, N_word, after))
            verdict = FAILED;
    }
    Py_XDECREF(transfers);
    return verdict;
}

static Verdict restart_cursors(Folding *folding)
{
    PyObject *requests = PyDict_Values(field(folding, N_requests));
    Verdict verdict = requests == NULL ? FAILED : FOLDED;
    for (Py_ssize_t one = 0; verdict == FOLDED && one < PyList_Size(requests); one++) {
        PyObject *request = PyList_GetItem(requests, one);
        if (PyObject_SetAttr(request, name_of(N_settled), python.no_ids) < 0 ||
            PyObject_SetAttr(request, name_of(N_offered), python.no_ids) < 0)
            verdict = FAILED;
    }
    Py_XDECREF(requests);
    return verdict;
}

static bool in_range(int32_t word, int first, int last) { return first <= state_of(word) && state_of(word) <= last; }

/* Tell the listener which keys could be read. */
static Verdict tell_removed(Folding *folding)
{
    const Words *blocks = &folding->fold->blocks;
    PyObject *listener = field(folding, N_listener), *key_of = field(folding, N_key_of);
    if (listener == Py_None)
        return FOLDED;
    PyObject *keys = PyList_New(0);
    Py_ssize_t readable = 0;
    for (int32_t slot = 0; keys != NULL && slot < blocks->size; slot++) {
        if (!in_range(blocks->words[slot], FIRST_READABLE, LAST_READABLE))
            continue;
        readable++;
        PyObject *key = PyList_GetItem(key_of, slot);
        if (key == NULL || PyList_Append(keys, key) < 0)
            Py_CLEAR(keys);
    }
    PyObject *heard = keys == NULL || readable == 0
                          ? keys
                          : PyObject_CallMethodObjArgs(listener, name_of(N_removed), keys, NULL);
    const Verdict verdict = heard == NULL ? FAILED : FOLDED;
    if (heard != keys)
        Py_XDECREF(heard);
    Py_XDECREF(keys);
    return verdict;
}

/* Void every block that the index names: all of its entries go at once. */
static Verdict invalidate_all(Folding *folding)
{
    const Words *blocks = &folding->fold->blocks;
    KeyIndex *index = index_of(folding);
    SlotQueue *free_slots = free_queue(folding);
    if (index->size == 0)
        return FOLDED;
    if (tell_removed(folding) != FOLDED)
        return FAILED;
    for (int32_t slot = 0; slot < blocks->size; slot++) {
        const int32_t word = blocks->words[slot];
        if (!in_range(word, FIRST_INDEXED, LAST_INDEXED))
            continue;
        /* The table allows it in every state. */
        blocks->words[slot] = machine_step(&BLOCK, BLOCK_INVALIDATE, word);
        if (blocks->words[slot] == EVICTED_WORD)
            queue_append(free_slots, slot);
    }
    index_clear(index);
    return set_field(folding, N_voided_at, folding->seq_object) && set_field(folding, N_forgotten_at, folding->seq_object)
               ? FOLDED
               : FAILED;
}

/* A new eviction order, and an end to what a listener knows. */
static Verdict begin_again(Folding *folding)
{
    PyObject *config = field(folding, N_config), *listener = field(folding, N_listener), *done = NULL;
    PyObject *name = PyObject_GetAttr(config, name_of(N_policy)), *slots = PyLong_FromLong(folding->fold->blocks.size);
    PyObject *policy = name == NULL || slots == NULL
                           ? NULL
                           : PyObject_CallFunctionObjArgs(python.make_policy, name, slots, NULL);
    bool all = policy != NULL && set_field(folding, N_policy, policy);
    if (all && listener != Py_None) {
        done = PyObject_CallMethodObjArgs(listener, name_of(N_cleared), NULL);
        all = done != NULL;
    }
    Py_XDECREF(name);
    Py_XDECREF(slots);
    Py_XDECREF(policy);
    Py_XDECREF(done);
    return all ? FOLDED : FAILED;
}

static Verdict reset(Folding *folding, PyObject *epoch, PyObject *weights)
{
    if (!set_field(folding, N_epoch, epoch) || (weights != Py_None && !set_field(folding, N_weights, weights)) ||
        abandon_all(folding, false) != FOLDED || invalidate_all(folding) != FOLDED)
        return FAILED;
    PyObject *aged = PyObject_CallMethodObjArgs(field(folding, N_provenance), name_of(N_age), NULL);
    Py_XDECREF(aged);
    if (aged == NULL || restart_cursors(folding) != FOLDED)
        return FAILED;
    return begin_again(folding);
}

/* Under LRU, with nothing planned and nothing on its way to another tier. */
Verdict cache_reset(Folding *folding)
{
    PyObject *epoch = PyObject_GetAttr(folding->event, name_of(N_epoch));
    PyObject *weights = PyObject_GetAttr(folding->event, name_of(N_weights));
    int64_t next, before;
    Verdict verdict = REFERENCE;
    if (weights != NULL && read_number(epoch, &next) && field_number(folding, N_epoch, &before) && next == before + 1 &&
        lru_queue(field(folding, N_policy)) != NULL && free_queue(folding) != NULL && may_reorder(folding, NULL) &&
        abandon_all(folding, true) == FOLDED)
        verdict = reset(folding, epoch, weights);
    Py_XDECREF(epoch);
    Py_XDECREF(weights);
    return verdict;
}
