/* Who stands in the eviction order (kvsm/ledger/order.py). Copies to other tiers are left to Python. */

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

/* Tell a policy of the slots whose word is `wanted`: `method`(slots). An empty batch is told if `always`. */
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

/* These blocks are stored now. */
Verdict admit(Folding *folding, const Batch *slots, PyObject *keys)
{
    PyObject *policy = field(folding, N_policy);
    SlotQueue *queue = lru_queue(policy);
    if (queue != NULL) {
        for (Py_ssize_t one = slots->count - 1; one >= 0; one--)
            queue_append(queue, (int32_t)slots->ids[one]);
        return FOLDED;
    }
    PyObject *done = PyObject_CallMethodObjArgs(policy, name_of(N_admitted), slots->object, keys, NULL);
    Py_XDECREF(done);
    return done == NULL ? FAILED : FOLDED;
}
