/* Decides which blocks are in the eviction order (kvsm/core/ledger/order.py). Copies to other tiers are left to
   Python. */

#include "body.h"

SlotQueue *lru_queue(PyObject *policy)
{
    if (policy == NULL || (PyObject *)Py_TYPE(policy) != python.lru)
        return NULL;
    PyObject *queue = attribute_of(policy, N__queue);
    if (queue == NULL) {
        PyErr_Clear();
        return NULL;
    }
    Py_DECREF(queue); /* the policy has it */
    return PyObject_TypeCheck(queue, python.slot_queue) ? (SlotQueue *)queue : NULL;
}

SlotQueue *free_queue(Folding *folding)
{
    PyObject *queue = field(folding, N_free);
    return queue != NULL && PyObject_TypeCheck(queue, python.slot_queue) ? (SlotQueue *)queue : NULL;
}

/* Whether this body may move blocks of the request: no copy to another tier holds any. */
bool may_reorder(Folding *folding, PyObject *request)
{
    if (!is_empty(field(folding, N_copied_out)))
        return false;
    if (request == NULL)
        return true;
    PyObject *target = attribute_of(request, N_target);
    const bool none = target != NULL && same_text(target, python.empty_text);
    PyErr_Clear();
    Py_XDECREF(target);
    return none;
}

/* Call `method`(slots) of a policy with the slots whose word is `wanted`; with an empty batch only if `always`. */
static Verdict tell(PyObject *policy, Name method, const Batch *slots, const int32_t *words, int32_t wanted,
                    bool always)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t one = 0; one < slots->count; one++)
        count += words[one] == wanted;
    if (count == 0 && !always)
        return FOLDED;
    PyObject *told = slots->object;
    if (count == slots->count)
        Py_INCREF(told);
    else {
        int64_t *picked = malloc((size_t)(count + 1) * sizeof *picked);
        if (picked == NULL) {
            PyErr_NoMemory();
            return FAILED;
        }
        count = 0;
        for (Py_ssize_t one = 0; one < slots->count; one++)
            if (words[one] == wanted)
                picked[count++] = slots->ids[one];
        told = ids_object(picked, count);
        free(picked);
        if (told == NULL)
            return FAILED;
    }
    PyObject *done = PyObject_CallMethodObjArgs(policy, name_of(method), told, NULL);
    Py_DECREF(told);
    Py_XDECREF(done);
    return done == NULL ? FAILED : FOLDED;
}

/* A match has pinned these slots; `pinned` are their new words. */
Verdict leave_order(Folding *folding, const Batch *slots, const int32_t *pinned)
{
    PyObject *policy = field(folding, N_policy);
    SlotQueue *queue = lru_queue(policy);
    if (queue == NULL)
        return tell(policy, N_busy, slots, pinned, PINNED_ONCE, false);
    for (Py_ssize_t one = 0; one < slots->count; one++)
        if (pinned[one] == PINNED_ONCE)
            queue_remove(queue, (int32_t)slots->ids[one]);
    return FOLDED;
}

/* A pin or a copy of these slots has ended; `released` are their new words. idle: how many nothing holds now. */
Verdict come_back(Folding *folding, const Batch *slots, const int32_t *released, Py_ssize_t *idle)
{
    PyObject *policy = field(folding, N_policy);
    SlotQueue *queue = lru_queue(policy);
    *idle = 0;
    for (Py_ssize_t one = slots->count - 1; one >= 0; one--) {
        if (released[one] != IDLE)
            continue;
        ++*idle;
        if (queue != NULL)
            queue_append(queue, (int32_t)slots->ids[one]);
    }
    return queue != NULL ? FOLDED : tell(policy, N_idle, slots, released, IDLE, false);
}

/* These slots were used in passing. */
Verdict touch(Folding *folding, const Batch *slots, const int32_t *words)
{
    PyObject *policy = field(folding, N_policy);
    SlotQueue *queue = lru_queue(policy);
    if (queue == NULL)
        return tell(policy, N_touched, slots, words, IDLE, true);
    for (Py_ssize_t one = slots->count - 1; one >= 0; one--)
        if (words[one] == IDLE)
            queue_append(queue, (int32_t)slots->ids[one]);
    return FOLDED;
}

/* Whether this is a valid `parents` of a batch: pairs (place, slot or None), sorted by place. */
bool parents_fit(Folding *folding, PyObject *parents, Py_ssize_t count)
{
    int64_t before = -1, place, slot;
    if (parents == NULL || !PyTuple_CheckExact(parents))
        return false;
    for (Py_ssize_t one = 0; one < PyTuple_Size(parents); one++) {
        PyObject *pair = PyTuple_GetItem(parents, one);
        if (!PyTuple_CheckExact(pair) || PyTuple_Size(pair) != 2 ||
            !read_number(PyTuple_GetItem(pair, 0), &place) || place <= before || place >= count ||
            (PyTuple_GetItem(pair, 1) != Py_None &&
             (!read_number(PyTuple_GetItem(pair, 1), &slot) || slot >= folding->fold->blocks.size)))
            return false;
        before = place;
    }
    return true;
}

/* Return the place at which a run enters the queue; the run continues the block in `slot` (`_place_of`). */
static int32_t place_of(Folding *folding, SlotQueue *queue, PyObject *parent, int64_t planned_at)
{
    const Fold *fold = folding->fold;
    int64_t slot = -1;
    if (parent == Py_None || !read_number(parent, &slot) || fold->generation[slot] > planned_at ||
        state_of(fold->blocks.words[slot]) < FIRST_INDEXED || state_of(fold->blocks.words[slot]) > LAST_INDEXED)
        slot = queue_first(queue);
    return queue_place(queue, slot);
}

/* Whether a run continues a block of its own batch. Only then the sequence of the runs is not the usual one. */
static bool continues_itself(Folding *folding, const Batch *slots, PyObject *parents, int64_t planned_at)
{
    int64_t place, slot;
    for (Py_ssize_t run = 0; run < PyTuple_Size(parents); run++) {
        PyObject *pair = PyTuple_GetItem(parents, run), *parent = PyTuple_GetItem(pair, 1);
        if (parent != Py_None && read_number(PyTuple_GetItem(pair, 0), &place) && read_number(parent, &slot) &&
            place < slots->count && slot != slots->ids[place] && folding->fold->generation[slot] == planned_at)
            return true;
    }
    return false;
}

/* Under LRU: insert the runs of a batch into the queue, the last run first (`_runs`). */
static Verdict enter_queue(Folding *folding, SlotQueue *queue, const Batch *slots, PyObject *parents,
                           int64_t planned_at)
{
    Py_ssize_t end = slots->count;
    for (Py_ssize_t run = PyTuple_Size(parents); run >= 0 && end > 0; run--) {
        int64_t begin = 0, own = -1;
        int32_t place = 0;
        if (run > 0) {
            PyObject *pair = PyTuple_GetItem(parents, run - 1), *parent = PyTuple_GetItem(pair, 1);
            if (!read_number(PyTuple_GetItem(pair, 0), &begin) || begin >= end)
                return FAILED;
            if (parent == Py_None || !read_number(parent, &own) || own != slots->ids[begin])
                place = place_of(folding, queue, parent, planned_at);
        }
        while (end > begin)
            queue_insert(queue, (int32_t)slots->ids[--end], place);
    }
    return FOLDED;
}

/* Add stored blocks to the eviction order. Runs that continue each other are left to Python. */
Verdict admit(Folding *folding, const Batch *slots, PyObject *keys, PyObject *parents, int64_t planned_at)
{
    PyObject *policy = field(folding, N_policy), *done;
    SlotQueue *queue = lru_queue(policy);
    if (queue != NULL && !continues_itself(folding, slots, parents, planned_at))
        return enter_queue(folding, queue, slots, parents, planned_at);
    if (is_empty(parents)) {
        done = PyObject_CallMethodObjArgs(policy, name_of(N_admitted), slots->object, keys, NULL);
    } else {
        PyObject *planned = PyLong_FromLongLong(planned_at);
        done = planned == NULL ? NULL
                               : PyObject_CallFunctionObjArgs(python.admit_runs, (PyObject *)folding->fold,
                                                              slots->object, keys, parents, planned, NULL);
        Py_XDECREF(planned);
    }
    Py_XDECREF(done);
    return done == NULL ? FAILED : FOLDED;
}
