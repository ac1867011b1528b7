/* Transfers: planned, submitted, reported by workers, and the ways in which they end
   (kvsm/core/ledger/transfers.py). Losses, and loads that fail, are left to Python. */

#include "body.h"

/* What this body reads of a live transfer. */
typedef struct {
    PyObject *record, *keys; /* owned */
    int64_t id;
    int32_t word;
    bool store;
    Batch slots, device_blocks;
} Transfer;

static void transfer_clear(Transfer *transfer)
{
    batch_clear(&transfer->slots);
    batch_clear(&transfer->device_blocks);
    Py_CLEAR(transfer->keys);
    Py_CLEAR(transfer->record);
}

static bool read_batch(PyObject *record, Name name, Batch *batch)
{
    PyObject *ids = attribute_of(record, name);
    const bool read = ids != NULL && batch_of(batch, ids);
    Py_XDECREF(ids);
    return read;
}

/* The live transfer of this id. false: there is none. To be cleared in any case. */
static bool find(Folding *folding, PyObject *id, Transfer *transfer)
{
    int64_t word;
    if (id == NULL || !PyLong_CheckExact(id))
        return false;
    transfer->record = PyDict_GetItemWithError(field(folding, N_transfers), id);
    if (transfer->record == NULL)
        return false;
    Py_INCREF(transfer->record);
    PyObject *direction = attribute_of(transfer->record, N_direction);
    transfer->store = direction == python.store;
    Py_XDECREF(direction);
    if (!get_number(transfer->record, N_id, &transfer->id) || !get_number(transfer->record, N_word, &word))
        return false;
    transfer->word = (int32_t)word;
    return true;
}

static bool find_with_batches(Folding *folding, PyObject *id, Transfer *transfer)
{
    return find(folding, id, transfer) && read_batch(transfer->record, N_slots, &transfer->slots) &&
           read_batch(transfer->record, N_device_blocks, &transfer->device_blocks) &&
           (transfer->keys = attribute_of(transfer->record, N_keys)) != NULL &&
           PyTuple_CheckExact(transfer->keys);
}

Verdict plan(Folding *folding, PyObject *direction, PyObject *owners, const Batch *slots, const Batch *device_blocks,
             PyObject *keys, PyObject *parents)
{
    PyObject *record = PyObject_CallFunctionObjArgs(
        python.transfer_record, folding->seq_object, direction, owners, slots->object, device_blocks->object, keys,
        field(folding, N_planned_word), field(folding, N_epoch), NULL);
    const bool done = record != NULL &&
                      (parents == NULL || is_empty(parents) ||
                       set_attribute(record, N_parents, parents)) &&
                      PyDict_SetItem(field(folding, N_transfers), folding->seq_object, record) == 0;
    Py_XDECREF(record);
    return done ? FOLDED : FAILED;
}

/* Whether each slot has its chunk of device blocks, and there is at least one. */
bool pairs_fit(Folding *folding, const Batch *slots, const Batch *device_blocks)
{
    int64_t chunk;
    return get_number(field(folding, N_config), N_blocks_per_chunk, &chunk) && device_blocks->count > 0 &&
           device_blocks->count == slots->count * chunk;
}

/* The ids of an event that names transfers, if all are live and none is twice; owned. */
static PyObject *distinct_transfers(Folding *folding)
{
    PyObject *ids = value_of(folding, N_transfers);
    PyObject *transfers = field(folding, N_transfers);
    bool fit = ids != NULL && PyTuple_CheckExact(ids) && PyTuple_Size(ids) <= 4 * SMALL;
    int64_t numbers[4 * SMALL];
    for (Py_ssize_t one = 0; fit && one < PyTuple_Size(ids); one++) {
        fit = read_number(PyTuple_GetItem(ids, one), &numbers[one]) &&
              PyDict_GetItemWithError(transfers, PyTuple_GetItem(ids, one)) != NULL;
        for (Py_ssize_t earlier = 0; fit && earlier < one; earlier++)
            fit = numbers[earlier] != numbers[one];
    }
    if (!fit)
        Py_CLEAR(ids);
    return ids;
}

/* Submit one transfer, or only see whether that is allowed. */
static Verdict submit(Folding *folding, PyObject *id, bool only_look)
{
    Fold *fold = folding->fold;
    Transfer transfer = {0};
    Verdict verdict = REFERENCE;
    int32_t word;
    if (!find(folding, id, &transfer) || (word = machine_step(&TRANSFER, TRANSFER_SUBMIT, transfer.word)) < 0)
        goto end;
    if (transfer.store) {
        if (!read_batch(transfer.record, N_slots, &transfer.slots))
            goto end;
        int32_t *storing = next_words(folding, &fold->blocks, &BLOCK, BLOCK_SUBMIT_STORE, &transfer.slots);
        if (storing == NULL)
            goto end;
        if (!only_look)
            commit(&fold->blocks, &transfer.slots, storing);
    }
    verdict = FOLDED;
    if (!only_look && (!set_number(transfer.record, N_word, word) ||
                       !set_attribute(transfer.record, N_since, field(folding, N_tick))))
        verdict = FAILED;
end:
    transfer_clear(&transfer);
    return verdict;
}

Verdict transfers_submitted(Folding *folding)
{
    PyObject *ids = distinct_transfers(folding);
    Verdict verdict = ids == NULL ? REFERENCE : FOLDED;
    const Py_ssize_t count = ids == NULL ? 0 : PyTuple_Size(ids);
    for (Py_ssize_t one = 0; verdict == FOLDED && one < count; one++)
        verdict = submit(folding, PyTuple_GetItem(ids, one), true);
    for (Py_ssize_t one = 0; verdict == FOLDED && one < count; one++)
        verdict = submit(folding, PyTuple_GetItem(ids, one), false);
    Py_XDECREF(ids);
    return verdict;
}

Verdict flush_requested(Folding *folding)
{
    PyObject *ids = distinct_transfers(folding);
    Verdict verdict = ids == NULL ? REFERENCE : FOLDED;
    for (Py_ssize_t one = 0; verdict == FOLDED && one < PyTuple_Size(ids); one++) {
        PyObject *record = PyDict_GetItemWithError(field(folding, N_transfers), PyTuple_GetItem(ids, one));
        if (record == NULL || !set_attribute(record, N_flush, Py_True))
            verdict = FAILED;
    }
    Py_XDECREF(ids);
    return verdict;
}

/* The request of a load; borrowed. NULL: REFERENCE. */
static PyObject *request_of(Folding *folding, const Transfer *transfer)
{
    PyObject *owners = attribute_of(transfer->record, N_owners), *request = NULL;
    if (owners != NULL && PyTuple_CheckExact(owners) && PyTuple_Size(owners) == 1)
        request = named(folding, PyTuple_GetItem(PyTuple_GetItem(owners, 0), 0));
    Py_XDECREF(owners);
    return request;
}

/* Return empty slots to the free queue. */
static void give_back(Folding *folding, const Batch *slots, const int32_t *words)
{
    SlotQueue *free_slots = free_queue(folding);
    for (Py_ssize_t one = 0; one < slots->count; one++)
        if (words[one] == EVICTED_WORD)
            queue_append(free_slots, (int32_t)slots->ids[one]);
}

/* Report a good store, whose blocks are readable now, to the policy, the history of offers and the listener. */
static Verdict publish(Folding *folding, const Transfer *transfer)
{
    PyObject *offers = field(folding, N_offers), *listener = field(folding, N_listener), *done;
    PyObject *parents = attribute_of(transfer->record, N_parents);
    const bool admitted =
        parents != NULL && admit(folding, &transfer->slots, transfer->keys, parents, transfer->id) == FOLDED;
    Py_XDECREF(parents);
    if (!admitted)
        return FAILED;
    PyObject *times = attribute_of(offers, N_times);
    if (times == NULL)
        return FAILED;
    const bool remembers = PyObject_Size(times) > 0;
    Py_DECREF(times);
    if (remembers) {
        done = PyObject_CallMethodObjArgs(offers, name_of(N_forget), transfer->keys, NULL);
        Py_XDECREF(done);
        if (done == NULL)
            return FAILED;
    }
    if (listener == Py_None)
        return FOLDED;
    PyObject *id = PyLong_FromLongLong(transfer->id);
    done = id == NULL ? NULL : PyObject_CallMethodObjArgs(listener, name_of(N_stored), id, transfer->keys, NULL);
    Py_XDECREF(id);
    Py_XDECREF(done);
    return done == NULL ? FAILED : FOLDED;
}

/* End the copies of a transfer. after: the new words of its slots. state: the state of the transfer. */
static Verdict end_copies(Folding *folding, const Transfer *transfer, int state, const int32_t *after)
{
    const Batch *slots = &transfer->slots;
    Py_ssize_t idle;
    commit(&folding->fold->blocks, slots, after);
    if (!transfer->store) {
        if (come_back(folding, slots, after, &idle) != FOLDED)
            return FAILED;
    } else if (state == TRANSFER_COMPLETED) {
        return publish(folding, transfer);
    } else if (state != TRANSFER_DRAINED) { /* it failed, or was cancelled: its keys can be found no more */
        PyObject *keys = remove_keys(folding, slots);
        if (keys == NULL)
            return FAILED;
        Py_DECREF(keys);
    }
    give_back(folding, slots, after);
    return FOLDED;
}

/* Forget the transfer; update the request that it loads for, and wake the requests that wait for it. */
static Verdict close_transfer(Folding *folding, const Transfer *transfer, int state)
{
    PyObject *id = PyLong_FromLongLong(transfer->id), *request = NULL;
    int64_t word;
    Verdict verdict = FOLDED;
    if (id == NULL)
        return FAILED;
    if (!transfer->store) {
        request = request_of(folding, transfer);
        Py_XINCREF(request);
    }
    if (PyDict_DelItem(field(folding, N_transfers), id) < 0 ||
        !set_field(folding, N_ended_at, folding->seq_object))
        verdict = FAILED;
    if (verdict == FOLDED && request != NULL) {
        if (state != TRANSFER_COMPLETED) {
            /* The request computes these blocks itself before it offers them. */
            PyObject *done = PyObject_CallMethodObjArgs(field(folding, N_provenance), name_of(N_forget),
                                                        transfer->device_blocks.object, NULL);
            Py_XDECREF(done);
            verdict = done == NULL ? FAILED : FOLDED;
        }
        if (verdict == FOLDED && (!set_attribute(request, N_load, python.zero) ||
                                  !get_number(request, N_word, &word)))
            verdict = FAILED;
        if (verdict == FOLDED)
            verdict = settle(folding, request, machine_step(&REQUEST, REQUEST_END_LOAD, (int32_t)word));
    }
    if (verdict == FOLDED)
        verdict = wake_waiting(folding, transfer->id);
    Py_DECREF(id);
    Py_XDECREF(request);
    return verdict;
}

/* Whether the end of this transfer can be folded here: the steps of its leases and of its request exist. */
static bool may_end(Folding *folding, const Transfer *transfer)
{
    const int trigger = transfer->store ? LEASE_END_READ : LEASE_END_WRITE;
    PyObject *request = NULL;
    int64_t word;
    if (free_queue(folding) == NULL ||
        next_words(folding, &folding->fold->leases, &LEASE, trigger, &transfer->device_blocks) == NULL)
        return false;
    if (!transfer->store) {
        request = request_of(folding, transfer);
        if (request == NULL || !get_number(request, N_word, &word) ||
            machine_step(&REQUEST, REQUEST_END_LOAD, (int32_t)word) < 0)
            return false;
    }
    return transfer->store || may_reorder(folding, request);
}

/* End the transfer, which is in `word` from now on, after block trigger `trigger`. */
static Verdict end(Folding *folding, Transfer *transfer, int32_t word, int trigger)
{
    Fold *fold = folding->fold;
    const int state = state_of(word), lease = transfer->store ? LEASE_END_READ : LEASE_END_WRITE;
    if (!may_end(folding, transfer))
        return REFERENCE;
    const int32_t *after = next_words(folding, &fold->blocks, &BLOCK, trigger, &transfer->slots);
    if (after == NULL)
        return REFERENCE;
    if (!set_number(transfer->record, N_word, word) || end_copies(folding, transfer, state, after) != FOLDED)
        return FAILED;
    commit(&fold->leases, &transfer->device_blocks,
           next_words(folding, &fold->leases, &LEASE, lease, &transfer->device_blocks));
    if (close_transfer(folding, transfer, state) != FOLDED)
        return FAILED;
    Py_INCREF(transfer->record);
    folding->ended = transfer->record;
    return FOLDED;
}

/* Note that a worker has reported. */
static bool note_report(Transfer *transfer, int64_t reported, int64_t worker)
{
    return set_number(transfer->record, N_reported, reported | (int64_t)1 << worker);
}

Verdict worker_reported(Folding *folding)
{
    PyObject *id = value_of(folding, N_transfer), *number = value_of(folding, N_worker);
    PyObject *good = value_of(folding, N_good);
    int64_t worker, workers, reported;
    Transfer transfer = {0};
    Verdict verdict = REFERENCE;
    if (good == NULL || !PyBool_Check(good) || !read_number(number, &worker) || worker >= 62 ||
        !get_number(field(folding, N_config), N_workers, &workers) || worker >= workers ||
        !find_with_batches(folding, id, &transfer) || !get_number(transfer.record, N_reported, &reported) ||
        reported >> worker & 1)
        goto end;
    const int32_t word =
        machine_step(&TRANSFER, good == Py_True ? TRANSFER_REPORT_GOOD : TRANSFER_REPORT_BAD, transfer.word);
    if (word < 0)
        goto end;
    const int state = state_of(word);
    if (state == TRANSFER_SUBMITTED || state == TRANSFER_ABANDONED) {
        const bool noted = set_number(transfer.record, N_word, word) && note_report(&transfer, reported, worker);
        verdict = noted ? FOLDED : FAILED;
    } else if (state != TRANSFER_FAILED || transfer.store) {
        verdict = end(folding, &transfer, word,
                      state == TRANSFER_COMPLETED ? BLOCK_END_COPY_GOOD : BLOCK_END_COPY_BAD);
        if (verdict == FOLDED && !note_report(&transfer, reported, worker))
            verdict = FAILED;
    }
end:
    transfer_clear(&transfer);
    Py_XDECREF(id);
    Py_XDECREF(number);
    Py_XDECREF(good);
    return verdict;
}

Verdict transfer_cancelled(Folding *folding)
{
    PyObject *id = value_of(folding, N_transfer);
    Transfer transfer = {0};
    Verdict verdict = REFERENCE;
    if (find_with_batches(folding, id, &transfer)) {
        const int32_t word = machine_step(&TRANSFER, TRANSFER_CANCEL, transfer.word);
        if (word >= 0)
            verdict = end(folding, &transfer, word, transfer.store ? BLOCK_CANCEL : BLOCK_END_COPY_BAD);
    }
    transfer_clear(&transfer);
    Py_XDECREF(id);
    return verdict;
}
