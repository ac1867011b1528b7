/* Loads: which device blocks a match is loaded into, and what they then hold (kvsm/core/ledger/loads.py). */

#include "body.h"

/* What the event names of a load, and what the ledger has of it. */
typedef struct {
    PyObject *name, *request; /* owned */
    Batch slots, device_blocks, pins;
    Batch rest; /* the pins that are not loaded; its ids are those of `pins` */
} Load;

/* Note the key that is loaded into each device block. */
static Verdict bring(Folding *folding, const Batch *slots, const Batch *device_blocks)
{
    PyObject *provenance = field(folding, N_provenance), *key_of = field(folding, N_key_of);
    PyObject *stale = attribute_of(provenance, N_stale);
    PyObject *brought = attribute_of(provenance, N_brought);
    Verdict verdict = stale == NULL || brought == NULL ? FAILED : FOLDED;
    const Py_ssize_t chunk = slots->count ? device_blocks->count / slots->count : 1;
    if (verdict == FOLDED && !is_empty(stale)) {
        PyObject *done =
            PyObject_CallMethodObjArgs(provenance, name_of(N_rewritten), device_blocks->object, NULL);
        verdict = done == NULL ? FAILED : FOLDED;
        Py_XDECREF(done);
    }
    for (Py_ssize_t one = 0; verdict == FOLDED && one < device_blocks->count; one++) {
        PyObject *key = PyList_GetItem(key_of, (Py_ssize_t)slots->ids[one / chunk]);
        PyObject *block = PyLong_FromLongLong(device_blocks->ids[one]);
        if (key == NULL || block == NULL || PyDict_SetItem(brought, block, key) < 0)
            verdict = FAILED;
        Py_XDECREF(block);
    }
    Py_XDECREF(stale);
    Py_XDECREF(brought);
    return verdict;
}

/* Whether the load names the first pins of its request's match. */
static bool loads_its_match(const Load *load)
{
    if (load->slots.count > load->pins.count)
        return false;
    for (Py_ssize_t one = 0; one < load->slots.count; one++)
        if (load->slots.ids[one] != load->pins.ids[one])
            return false;
    return true;
}

/* The one owner of a load: ((its request, how many blocks),). */
static PyObject *owners_of(PyObject *name, Py_ssize_t blocks)
{
    PyObject *count = PyLong_FromSsize_t(blocks);
    PyObject *owner = count == NULL ? NULL : PyTuple_Pack(2, name, count);
    PyObject *owners = owner == NULL ? NULL : PyTuple_Pack(1, owner);
    Py_XDECREF(count);
    Py_XDECREF(owner);
    return owners;
}

/* Pins become readers, device blocks are leased, and the other pins end. */
static Verdict begin(Folding *folding, Load *load, int32_t word)
{
    Fold *fold = folding->fold;
    const Batch *slots = &load->slots, *device_blocks = &load->device_blocks;
    commit(&fold->blocks, slots, next_words(folding, &fold->blocks, &BLOCK, BLOCK_BEGIN_LOAD, slots));
    commit(&fold->leases, device_blocks,
           next_words(folding, &fold->leases, &LEASE, LEASE_BEGIN_WRITE, device_blocks));
    int32_t *unpinned = next_words(folding, &fold->blocks, &BLOCK, BLOCK_UNPIN, &load->rest);
    if (unpin(folding, load->request, &load->rest, unpinned) != FOLDED ||
        !set_number(load->request, N_word, word) ||
        !set_attribute(load->request, N_load, folding->seq_object) ||
        bring(folding, slots, device_blocks) != FOLDED)
        return FAILED;
    PyObject *owners = owners_of(load->name, slots->count);
    if (owners == NULL)
        return FAILED;
    const Verdict verdict = plan(folding, python.load, owners, slots, device_blocks, python.no_ids, NULL);
    Py_DECREF(owners);
    return verdict;
}

/* The pins behind those that are loaded, in the ledger's form. */
static bool rest_of(Load *load)
{
    const Py_ssize_t loaded = load->slots.count;
    load->rest.count = load->pins.count - loaded;
    load->rest.ids = load->pins.ids + loaded;
    load->rest.object = ids_object(load->rest.ids, load->rest.count);
    return load->rest.object != NULL;
}

/* Everything that a load asks, before anything changes. A voided load, and one of parts, is left to Python. */
static bool may_begin(Folding *folding, Load *load, int32_t *word)
{
    Fold *fold = folding->fold;
    int64_t before;
    load->request = load->name == NULL ? NULL : named(folding, load->name);
    Py_XINCREF(load->request);
    if (load->request == NULL || !get_number(load->request, N_word, &before) ||
        (*word = machine_step(&REQUEST, REQUEST_BEGIN_LOAD, (int32_t)before)) < 0 ||
        !may_reorder(folding, load->request) || !live_pins(folding, load->request, &load->pins) ||
        !loads_its_match(load) || !rest_of(load) || !pairs_fit(folding, &load->slots, &load->device_blocks))
        return false;
    return next_words(folding, &fold->blocks, &BLOCK, BLOCK_BEGIN_LOAD, &load->slots) != NULL &&
           are_distinct(folding, &load->slots, fold->blocks.size) &&
           next_words(folding, &fold->blocks, &BLOCK, BLOCK_UNPIN, &load->rest) != NULL &&
           next_words(folding, &fold->leases, &LEASE, LEASE_BEGIN_WRITE, &load->device_blocks) != NULL &&
           are_distinct(folding, &load->device_blocks, fold->leases.size);
}

Verdict load_planned(Folding *folding)
{
    PyObject *ids = value_of(folding, N_slots);
    PyObject *blocks = value_of(folding, N_device_blocks);
    PyObject *voided = value_of(folding, N_voided), *parts = value_of(folding, N_parts);
    Load load = {.name = value_of(folding, N_request)};
    Verdict verdict = REFERENCE;
    int32_t word;
    if (voided == Py_False && parts != NULL && PyTuple_CheckExact(parts) && is_empty(parts) &&
        batch_of(&load.slots, ids) && batch_of(&load.device_blocks, blocks) && may_begin(folding, &load, &word))
        verdict = begin(folding, &load, word);
    batch_clear(&load.slots);
    batch_clear(&load.device_blocks);
    batch_clear(&load.pins);
    Py_XDECREF(load.rest.object);
    Py_XDECREF(ids);
    Py_XDECREF(blocks);
    Py_XDECREF(voided);
    Py_XDECREF(parts);
    Py_XDECREF(load.name);
    Py_XDECREF(load.request);
    return verdict;
}
