/* Stores: offers, evictions to make room, and plans (kvsm/core/ledger/stores.py). */

#include "body.h"

/* Whether an offer is legal: the request exists and has not ended, and it has settled no more than it has offered. */
static bool may_offer(Folding *folding, PyObject *offer)
{
    if (!PyTuple_CheckExact(offer) || PyTuple_Size(offer) != 3)
        return false;
    PyObject *request = named(folding, PyTuple_GetItem(offer, 0));
    PyObject *settled = PyTuple_GetItem(offer, 1), *offered = PyTuple_GetItem(offer, 2);
    int64_t word, least, most;
    if (request == NULL || !PyTuple_CheckExact(settled) || !PyTuple_CheckExact(offered) ||
        PyTuple_Size(settled) != PyTuple_Size(offered))
        return false;
    for (Py_ssize_t group = 0; group < PyTuple_Size(settled); group++)
        if (!read_number(PyTuple_GetItem(settled, group), &least) ||
            !read_number(PyTuple_GetItem(offered, group), &most) || least > most)
            return false;
    return get_number(request, N_word, &word) && state_of((int32_t)word) != REQUEST_FINISHED;
}

Verdict blocks_offered(Folding *folding)
{
    PyObject *offers = value_of(folding, N_offers);
    Verdict verdict = REFERENCE;
    if (offers == NULL || !PyTuple_CheckExact(offers))
        goto end;
    const Py_ssize_t count = PyTuple_Size(offers);
    for (Py_ssize_t one = 0; one < count; one++)
        if (!may_offer(folding, PyTuple_GetItem(offers, one)))
            goto end;
    verdict = FOLDED;
    for (Py_ssize_t one = 0; verdict == FOLDED && one < count; one++) {
        PyObject *offer = PyTuple_GetItem(offers, one), *request = named(folding, PyTuple_GetItem(offer, 0));
        if (!set_attribute(request, N_settled, PyTuple_GetItem(offer, 1)) ||
            !set_attribute(request, N_offered, PyTuple_GetItem(offer, 2)))
            verdict = FAILED;
    }
end:
    Py_XDECREF(offers);
    return verdict;
}

/* The policy learns which blocks it has refused. LRU refuses none. */
Verdict store_skipped(Folding *folding)
{
    return lru_queue(field(folding, N_policy)) != NULL ? FOLDED : REFERENCE;
}

/* Under LRU, whose choices move nothing else. */
Verdict blocks_evicted(Folding *folding)
{
    PyObject *ids = value_of(folding, N_slots);
    PyObject *moved = value_of(folding, N_moved), *keys = NULL;
    SlotQueue *order = lru_queue(field(folding, N_policy)), *free_slots = free_queue(folding);
    const Words *blocks = &folding->fold->blocks;
    Batch victims;
    Verdict verdict = REFERENCE;
    int32_t *new_words;
    if (order == NULL || free_slots == NULL || moved == NULL || !PyTuple_CheckExact(moved) || !is_empty(moved) ||
        !batch_of(&victims, ids))
        goto end;
    new_words = next_words(folding, blocks, &BLOCK, BLOCK_EVICT, &victims);
    if (new_words == NULL || !are_distinct(folding, &victims, blocks->size))
        goto clear;
    commit(blocks, &victims, new_words);
    keys = remove_keys(folding, &victims);
    verdict = keys == NULL ? FAILED : FOLDED;
    for (Py_ssize_t one = 0; one < victims.count; one++) {
        queue_remove(order, (int32_t)victims.ids[one]);
        queue_append(free_slots, (int32_t)victims.ids[one]);
    }
    PyObject *listener = field(folding, N_listener);
    if (verdict == FOLDED && listener != Py_None) {
        PyObject *heard = PyObject_CallMethodObjArgs(listener, name_of(N_removed), keys, NULL);
        Py_XDECREF(heard);
        verdict = heard == NULL ? FAILED : FOLDED;
    }
clear:
    batch_clear(&victims);
end:
    Py_XDECREF(ids);
    Py_XDECREF(moved);
    Py_XDECREF(keys);
    return verdict;
}

/* Whether the owners have all keys, or none. */
static bool owners_fit(PyObject *owners, Py_ssize_t keys)
{
    int64_t sum = 0, count;
    if (!PyTuple_CheckExact(owners))
        return false;
    for (Py_ssize_t one = 0; one < PyTuple_Size(owners); one++) {
        PyObject *owner = PyTuple_GetItem(owners, one);
        if (!PyTuple_CheckExact(owner) || PyTuple_Size(owner) != 2 ||
            !read_number(PyTuple_GetItem(owner, 1), &count) || count > INT32_MAX)
            return false;
        sum += count;
    }
    return sum == 0 || sum == keys;
}

/* Allocate the slots, lease the device blocks, and keep the plan. Everything was checked but the keys. */
static Verdict allocate(Folding *folding, PyObject *owners, PyObject *keys, PyObject *parents, const Batch *slots,
                        const Batch *device_blocks, const int32_t *allocated)
{
    Fold *fold = folding->fold;
    SlotQueue *free_slots = free_queue(folding);
    PyObject *provenance = field(folding, N_provenance);
    Verdict verdict = enter(folding, keys, slots);
    if (verdict != FOLDED)
        return verdict;
    commit(&fold->blocks, slots, allocated);
    const int32_t *leased = next_words(folding, &fold->leases, &LEASE, LEASE_BEGIN_READ, device_blocks);
    commit(&fold->leases, device_blocks, leased);
    for (Py_ssize_t one = 0; one < slots->count; one++) {
        queue_remove(free_slots, (int32_t)slots->ids[one]);
        fold->generation[slots->ids[one]] = folding->seq;
    }
    PyObject *stale = attribute_of(provenance, N_stale);
    if (stale == NULL)
        return FAILED;
    if (!is_empty(stale)) {
        PyObject *done =
            PyObject_CallMethodObjArgs(provenance, name_of(N_rewritten), device_blocks->object, NULL);
        verdict = done == NULL ? FAILED : FOLDED;
        Py_XDECREF(done);
    }
    Py_DECREF(stale);
    return verdict == FOLDED ? plan(folding, python.store, owners, slots, device_blocks, keys, parents) : verdict;
}

Verdict store_planned(Folding *folding)
{
    PyObject *owners = value_of(folding, N_owners), *keys = value_of(folding, N_keys);
    PyObject *source = value_of(folding, N_source), *ids = value_of(folding, N_slots);
    PyObject *blocks = value_of(folding, N_device_blocks), *parents = value_of(folding, N_parents);
    Fold *fold = folding->fold;
    Batch slots = {0}, device_blocks = {0};
    Verdict verdict = REFERENCE;
    int32_t *allocated = NULL;
    if (owners == NULL || keys == NULL || source == NULL || !same_text(source, python.empty_text) ||
        !PyTuple_CheckExact(keys) || free_queue(folding) == NULL || !batch_of(&slots, ids) ||
        !batch_of(&device_blocks, blocks))
        goto end;
    if (PyTuple_Size(keys) != slots.count || !owners_fit(owners, slots.count) ||
        !pairs_fit(folding, &slots, &device_blocks) || !parents_fit(folding, parents, slots.count))
        goto end;
    if (next_words(folding, &fold->leases, &LEASE, LEASE_BEGIN_READ, &device_blocks) == NULL ||
        !are_distinct(folding, &device_blocks, fold->leases.size) ||
        (allocated = next_words(folding, &fold->blocks, &BLOCK, BLOCK_ALLOCATE, &slots)) == NULL ||
        !are_distinct(folding, &slots, fold->blocks.size))
        goto end;
    verdict = allocate(folding, owners, keys, parents, &slots, &device_blocks, allocated);
end:
    batch_clear(&slots);
    batch_clear(&device_blocks);
    Py_XDECREF(owners);
    Py_XDECREF(keys);
    Py_XDECREF(source);
    Py_XDECREF(ids);
    Py_XDECREF(blocks);
    Py_XDECREF(parents);
    return verdict;
}
