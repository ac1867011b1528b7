/* The cache as a whole: blocks used in passing, and the reset (kvsm/core/ledger/cache.py). */

#include "body.h"

/* Fold `BlocksTouched`. Touches with parents are left to Python. */
Verdict blocks_touched(Folding *folding)
{
    PyObject *ids = value_of(folding, N_slots), *parents = value_of(folding, N_parents);
    const Words *blocks = &folding->fold->blocks;
    Batch slots;
    Verdict verdict = REFERENCE;
    if (may_reorder(folding, NULL) && parents != NULL && PyTuple_CheckExact(parents) && is_empty(parents) &&
        batch_of(&slots, ids)) {
        const int32_t *new_words = next_words(folding, blocks, &BLOCK, BLOCK_TOUCH, &slots);
        if (new_words != NULL && are_distinct(folding, &slots, blocks->size))
            verdict = touch(folding, &slots, new_words);
        batch_clear(&slots);
    }
    Py_XDECREF(ids);
    Py_XDECREF(parents);
    return verdict;
}

/* Abandon all transfers, or, with `only_look`, only check that it is legal: it is not while one is only planned. */
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
        if (!set_attribute(request, N_settled, python.no_ids) ||
            !set_attribute(request, N_offered, python.no_ids))
            verdict = FAILED;
    }
    Py_XDECREF(requests);
    return verdict;
}

enum {
    LINE = 16,   /* words of a cache line */
    AHEAD = 512, /* words: how far ahead memory is fetched. A reset of a large pool is as fast as its memory */
};

static bool in_range(int32_t word, int first, int last) { return first <= state_of(word) && state_of(word) <= last; }

/* Report the keys of all readable blocks to the listener as removed. */
static Verdict tell_removed(Folding *folding)
{
    const Words *blocks = &folding->fold->blocks;
    PyObject *listener = field(folding, N_listener), *key_of = field(folding, N_key_of);
    Py_ssize_t readable = 0, told = 0;
    for (int32_t slot = 0; listener != Py_None && slot < blocks->size; slot++)
        readable += in_range(blocks->words[slot], FIRST_READABLE, LAST_READABLE);
    if (readable == 0)
        return FOLDED;
    PyObject *keys = PyList_New(readable);
    for (int32_t slot = 0; keys != NULL && told < readable; slot++) {
        if (!in_range(blocks->words[slot], FIRST_READABLE, LAST_READABLE))
            continue;
        PyObject *key = PyList_GetItem(key_of, slot);
        Py_XINCREF(key);
        if (key == NULL || PyList_SetItem(keys, told++, key) < 0)
            Py_CLEAR(keys);
    }
    PyObject *heard = keys == NULL ? NULL : PyObject_CallMethodObjArgs(listener, name_of(N_removed), keys, NULL);
    Py_XDECREF(keys);
    Py_XDECREF(heard);
    return heard == NULL ? FAILED : FOLDED;
}

_Static_assert(BLOCK_FREE == 0, "void_idle takes a word of 0 for unused");

/* Void the idle blocks of a group. Returns whether all of its slots are unused then. A compiler makes vectors of
   this loop, since it has a fixed length and no branch. num_idle: how many blocks were idle so far. */
static bool void_idle(int32_t *words, int32_t *num_idle)
{
    int32_t used = 0, idle = 0;
    for (int one = 0; one < GROUP; one++) {
        const int32_t word = words[one];
        idle += word == IDLE;
        used |= word == IDLE ? 0 : word == EVICTED_WORD ? 0 : word;
        words[one] = word == IDLE ? EVICTED_WORD : word;
    }
    *num_idle += idle;
    return used == 0;
}

/* Void the blocks of a group, each as the table says. Returns which of its slots are unused then, a bit each. */
static uint64_t void_each(const Words *blocks, int32_t *words, int32_t count)
{
    uint64_t unused = 0;
    for (int32_t one = 0; one < count; one++) {
        /* The table allows it in every state. */
        if (in_range(words[one], FIRST_INDEXED, LAST_INDEXED)) {
            count_words(blocks, words[one], -1);
            words[one] = machine_step(&BLOCK, BLOCK_INVALIDATE, words[one]);
            count_words(blocks, words[one], 1);
        }
        if (words[one] == EVICTED_WORD || words[one] == BLOCK_FREE)
            unused |= (uint64_t)1 << one;
    }
    return unused;
}

/* Void every block, and make the unused slots free, in the order of their numbers. */
static void void_all(const Words *blocks, SlotQueue *free_slots)
{
    int32_t num_idle = 0;
    queue_clear(free_slots);
    for (int32_t group = 0; group < free_slots->groups; group++) {
        int32_t *words = blocks->words + (int64_t)group * GROUP;
        const int32_t left = blocks->size - group * GROUP;
        if (left > AHEAD + GROUP)
            for (int line = 0; line < GROUP; line += LINE)
                __builtin_prefetch(words + AHEAD + line, 1);
        const bool unused = left >= GROUP && void_idle(words, &num_idle);
        queue_fill_row(free_slots, group, unused ? ~(uint64_t)0 : void_each(blocks, words, left < GROUP ? left : GROUP));
    }
    count_words(blocks, IDLE, -num_idle);
    count_words(blocks, EVICTED_WORD, num_idle);
    if (num_idle)
        machine_step(&BLOCK, BLOCK_INVALIDATE, IDLE); /* so that the arc counts as taken */
}

/* Void every block in the index, and clear the index. */
static Verdict invalidate_all(Folding *folding)
{
    KeyIndex *index = index_of(folding);
    if (index->size != 0 &&
        (tell_removed(folding) != FOLDED || !set_field(folding, N_voided_at, folding->seq_object) ||
         !set_field(folding, N_forgotten_at, folding->seq_object)))
        return FAILED;
    void_all(&folding->fold->blocks, free_queue(folding));
    index_clear(index);
    if (field(folding, N_copied_out) != NULL)
        PyDict_Clear(field(folding, N_copied_out));
    return FOLDED;
}

/* Empty the eviction order. */
static Verdict order_again(Folding *folding)
{
    PyObject *policy = field(folding, N_policy);
    SlotQueue *queue = lru_queue(policy);
    if (queue != NULL) {
        queue_clear(queue);
        return FOLDED;
    }
    PyObject *done = PyObject_CallMethodObjArgs(policy, name_of(N_clear), NULL);
    Py_XDECREF(done);
    return done == NULL ? FAILED : FOLDED;
}

static Verdict tell_cleared(Folding *folding)
{
    PyObject *listener = field(folding, N_listener);
    if (listener == Py_None)
        return FOLDED;
    PyObject *heard = PyObject_CallMethodObjArgs(listener, name_of(N_cleared), NULL);
    Py_XDECREF(heard);
    return heard == NULL ? FAILED : FOLDED;
}

static Verdict reset(Folding *folding, PyObject *epoch, PyObject *weights)
{
    if (!set_field(folding, N_epoch, epoch) || (weights != Py_None && !set_field(folding, N_weights, weights)) ||
        abandon_all(folding, false) != FOLDED || invalidate_all(folding) != FOLDED)
        return FAILED;
    PyObject *aged = PyObject_CallMethodObjArgs(field(folding, N_provenance), name_of(N_age), NULL);
    Py_XDECREF(aged);
    if (aged == NULL || restart_cursors(folding) != FOLDED || order_again(folding) != FOLDED)
        return FAILED;
    return tell_cleared(folding);
}

/* Fold `CacheReset`, if no transfer is only planned. */
Verdict cache_reset(Folding *folding)
{
    PyObject *epoch = value_of(folding, N_epoch);
    PyObject *weights = value_of(folding, N_weights);
    int64_t next, before;
    Verdict verdict = REFERENCE;
    if (weights != NULL && read_number(epoch, &next) && field_number(folding, N_epoch, &before) && next == before + 1 &&
        free_queue(folding) != NULL && free_queue(folding)->capacity == folding->fold->blocks.size &&
        abandon_all(folding, true) == FOLDED)
        verdict = reset(folding, epoch, weights);
    Py_XDECREF(epoch);
    Py_XDECREF(weights);
    return verdict;
}
