/* Offers of computed blocks, planned as one store (kvsm/core/offloader/storing.py). Only under LRU, and only if each
   offered block is new or resident: an offer with a block that waits, is skipped or is refused is left to Python. */

#include "calls.h"

/* An offer. The arrays have an entry for each key. */
typedef struct {
    Call *call;
    PyObject *owners, *keys;   /* tuples; owned */
    PyObject *place_of;        /* key -> place, a dict; made when it is needed; owned */
    PyObject **begins;         /* the key before this block; NULL: that of the place before; owned */
    Py_ssize_t count;          /* of keys */
    int64_t chunk;             /* device blocks of a key */
    int64_t *sources;          /* the device blocks of all keys */
    int64_t *slot_of;          /* the slot of each key; -1: it is new, and has none yet */
    int64_t *places, *slots;   /* of the resident keys, then of the new ones */
    Py_ssize_t residents, news;
} Offer;

static void offer_end(Offer *offer)
{
    Py_XDECREF(offer->owners);
    Py_XDECREF(offer->keys);
    Py_XDECREF(offer->place_of);
    for (Py_ssize_t place = 0; offer->begins != NULL && place < offer->count; place++)
        Py_XDECREF(offer->begins[place]);
    PyMem_Free(offer->begins);
    PyMem_Free(offer->sources);
}

static inline PyObject *key_at(const Offer *offer, Py_ssize_t place) { return PyTuple_GetItem(offer->keys, place); }

static inline const KeyIndex *index_now(const Offer *offer) { return index_of(&offer->call->look); }

/* ------------------------------------------------------------------------------ what is offered */

bool is_key(PyObject *key)
{
    return PyBytes_CheckExact(key) && PyBytes_Size(key) <= PyLong_AsSsize_t(of_python.key_bytes_max);
}

/* Take the keys, which are distinct. */
static bool take_keys(Offer *offer, PyObject *given)
{
    if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given))
        return false;
    offer->keys = PyList_CheckExact(given) ? PyList_AsTuple(given) : owned(given);
    offer->count = offer->keys == NULL ? 0 : PyTuple_Size(offer->keys);
    for (Py_ssize_t place = 0; place < offer->count; place++)
        if (!is_key(key_at(offer, place)))
            return false;
    if (offer->count < 2)
        return offer->count == 1;
    PyObject *distinct = PySet_New(offer->keys);
    const bool are_distinct = distinct != NULL && PySet_Size(distinct) == offer->count;
    Py_XDECREF(distinct);
    return are_distinct;
}

/* Make the arrays, unless the ledger has fewer device blocks than the keys need. */
static bool take_memory(Offer *offer)
{
    const size_t count = (size_t)offer->count;
    if (!configured(offer->call, N_blocks_per_chunk, &offer->chunk) ||
        offer->chunk > offer->call->look.fold->leases.size / offer->count)
        return false;
    offer->sources = PyMem_Malloc(count * (3 + (size_t)offer->chunk) * sizeof *offer->sources);
    offer->begins = PyMem_Calloc(count, sizeof *offer->begins);
    if (offer->sources == NULL || offer->begins == NULL)
        return false;
    offer->slot_of = offer->sources + count * (size_t)offer->chunk;
    offer->places = offer->slot_of + count;
    offer->slots = offer->places + count;
    return true;
}

/* Take the device blocks, which are distinct. */
static bool take_sources(Offer *offer, PyObject *given)
{
    const Py_ssize_t count = offer->count * (Py_ssize_t)offer->chunk;
    Folding *look = &offer->call->look;
    const int32_t size = look->fold->leases.size;
    int64_t limit;
    PyObject *all = PyTuple_CheckExact(given) ? owned(given) : NULL;
    if (PyList_CheckExact(given) || PyRange_Check(given))
        all = PySequence_Tuple(given);
    bool fit = all != NULL && PyTuple_Size(all) == count && configured(offer->call, N_device_blocks, &limit) &&
               limit <= size;
    for (Py_ssize_t one = 0; fit && one < count; one++)
        fit = read_number(PyTuple_GetItem(all, one), &offer->sources[one]) && offer->sources[one] < limit;
    Py_XDECREF(all);
    const Batch blocks = {.ids = offer->sources, .count = count};
    return fit && are_distinct(look, &blocks, size);
}

/* Note the key before this place. */
static void begin_at(Offer *offer, int64_t place, PyObject *key)
{
    PyObject *before = offer->begins[place];
    offer->begins[place] = owned(key);
    Py_XDECREF(before);
}

/* Whether these own all keys of the offer, or none are named (`owners_of`). Notes where each owner's blocks begin. */
static bool take_owners(Offer *offer, PyObject *owners, PyObject *nothing)
{
    int64_t sum = 0, count;
    if (!PyTuple_CheckExact(owners))
        return false;
    for (Py_ssize_t one = 0; one < PyTuple_Size(owners); one++) {
        PyObject *owner = PyTuple_GetItem(owners, one);
        if (!PyTuple_CheckExact(owner) || PyTuple_Size(owner) != 2 || !is_name(PyTuple_GetItem(owner, 0)) ||
            !read_number(PyTuple_GetItem(owner, 1), &count) || count == 0 || count > offer->count - sum)
            return false;
        begin_at(offer, sum, nothing);
        sum += count;
    }
    offer->owners = owned(owners);
    return sum == offer->count || PyTuple_Size(owners) == 0;
}

/* Note the key before each block that does not continue the block at the place before (`parents_of`). */
static bool take_parents(Offer *offer, PyObject *parents)
{
    Py_ssize_t next = 0;
    PyObject *place, *key;
    int64_t number;
    if (!PyDict_CheckExact(parents))
        return false;
    while (PyDict_Next(parents, &next, &place, &key)) {
        if (!read_number(place, &number) || !is_key(key))
            return false;
        if (number < offer->count)
            begin_at(offer, number, key);
    }
    return true;
}

/* Find which keys are resident, and whether each of the others can be stored now. */
static bool find_keys(Offer *offer)
{
    const Fold *fold = offer->call->look.fold;
    const KeyIndex *index = index_now(offer);
    index_prefetch(index, offer->keys, offer->count);
    for (Py_ssize_t place = 0; place < offer->count; place++) {
        const int64_t slot = offer->slot_of[place] = index_find(index, key_at(offer, place));
        if (slot >= 0) {
            const int state = state_of(fold->blocks.words[slot]);
            if (state < FIRST_READABLE || state > LAST_READABLE) /* its store is in flight */
                return false;
            offer->places[offer->residents] = place;
            offer->slots[offer->residents++] = slot;
        } else if (slot == -2)
            return false;
    }
    for (Py_ssize_t place = 0; place < offer->count; place++) {
        if (offer->slot_of[place] >= 0)
            continue;
        for (int64_t one = place * offer->chunk; one < (place + 1) * offer->chunk; one++)
            if (fold->leases.words[offer->sources[one]] != 0) /* another copy has this block */
                return false;
        offer->places[offer->residents + offer->news++] = place;
    }
    return true;
}

/* Whether there is room for all new keys, perhaps by evictions (`_room_for`). */
static bool has_room(Offer *offer)
{
    Call *call = offer->call;
    SlotQueue *order = lru_queue(field(&call->look, N_policy)), *free_slots = free_queue(&call->look);
    int64_t most;
    if (order == NULL || free_slots == NULL || order->capacity != call->look.fold->blocks.size ||
        !is_empty(field(&call->look, N_copied_out)) ||
        !configured(call, N_max_live_transfers, &most) || PyDict_Size(field(&call->look, N_transfers)) >= most)
        return false;
    int64_t room = free_slots->size + order->size;
    for (Py_ssize_t one = 0; one < offer->residents; one++)
        room -= queue_place(order, offer->slots[one]) != 0;
    return room >= offer->news;
}

/* Whether uses and evictions have no listener, and jobs need neither keys nor generations. */
static bool is_plain(Call *call)
{
    PyObject *using = of_core(call, N_using), *evicting = of_core(call, N_evicting);
    const bool unheard = using == Py_None && evicting == Py_None;
    Py_XDECREF(using); /* the core keeps them alive */
    Py_XDECREF(evicting);
    return unheard && field(&call->look, N_kept) == Py_None;
}

/* Whether no device block has bytes of an older epoch. */
static bool none_is_stale(Call *call)
{
    PyObject *stale = attribute_of(field(&call->look, N_provenance), N_stale);
    const bool none = stale != NULL && is_empty(stale);
    Py_XDECREF(stale);
    return none;
}

/* --------------------------------------------------------------- the block before each block (`_runs`) */

/* The place of a key in the offer. -1: it is not there. -2: an error is set. */
static Py_ssize_t place_of(Offer *offer, PyObject *key)
{
    if (offer->place_of == NULL) {
        PyObject *places = PyDict_New();
        for (Py_ssize_t place = 0; places != NULL && place < offer->count; place++) {
            PyObject *number = PyLong_FromSsize_t(place);
            if (number == NULL || PyDict_SetItem(places, key_at(offer, place), number) < 0)
                Py_CLEAR(places);
            Py_XDECREF(number);
        }
        offer->place_of = places;
    }
    if (offer->place_of == NULL)
        return -2;
    PyObject *place = PyDict_GetItemWithError(offer->place_of, key);
    return place != NULL ? PyLong_AsSsize_t(place) : -1;
}

static PyObject *key_before(const Offer *offer, Py_ssize_t place)
{
    if (offer->begins[place] != NULL)
        return offer->begins[place];
    return place > 0 ? key_at(offer, place - 1) : of_python.no_key;
}

/* The key of the block before this place. Keys that a later event stores are skipped, as `_parent_key` does. */
static PyObject *stored_before(Offer *offer, Py_ssize_t place)
{
    PyObject *key = key_before(offer, place);
    for (Py_ssize_t step = 0; step < offer->news; step++) { /* bounded, because the keys may form a cycle */
        const Py_ssize_t before = place_of(offer, key);
        if (before == -2)
            return NULL;
        if (before < 0 || offer->slot_of[before] >= 0)
            break;
        key = key_before(offer, before);
    }
    return key;
}

/* The slot of the block before this place. own: the place begins a prompt. -1: no slot has it. -2: an error is set. */
static int64_t slot_before(Offer *offer, Py_ssize_t place, int64_t own, bool waits)
{
    PyObject *key = waits ? stored_before(offer, place) : key_before(offer, place);
    if (key == NULL)
        return -2;
    if (PyBytes_Size(key) == 0)
        return own;
    const int64_t slot = index_find(index_now(offer), key);
    if (slot != -1)
        return slot;
    const Py_ssize_t before = place_of(offer, key);
    return before < 0 ? before : offer->slot_of[before];
}

static bool add_run(PyObject *runs, Py_ssize_t place, int64_t parent)
{
    PyObject *slot = parent < 0 ? owned(Py_None) : PyLong_FromLongLong(parent), *number = PyLong_FromSsize_t(place);
    PyObject *run = slot == NULL || number == NULL ? NULL : PyTuple_Pack(2, number, slot);
    const bool done = run != NULL && PyList_Append(runs, run) == 0;
    Py_XDECREF(slot);
    Py_XDECREF(number);
    Py_XDECREF(run);
    return done;
}

/* The runs of the blocks at these places, which have these slots; owned. waits: the other keys are stored later. */
static PyObject *runs_of(Offer *offer, const int64_t *places, const int64_t *slots, Py_ssize_t count, bool waits)
{
    PyObject *runs = PyList_New(0);
    bool tells = false, done = runs != NULL;
    Py_ssize_t before = -1;
    for (Py_ssize_t one = 0; done && one < count; one++) {
        const Py_ssize_t place = (Py_ssize_t)places[one];
        bool begins = false;
        for (Py_ssize_t next = before + 1; next <= place; next++)
            begins |= offer->begins[next] != NULL;
        const bool follows = !begins && before == place - 1;
        before = place;
        if (follows)
            continue;
        const int64_t parent = slot_before(offer, place, slots[one], waits);
        if (parent == -2)
            done = false;
        else if (parent != (one > 0 ? slots[one - 1] : slots[0]) && (parent >= 0 || begins)) {
            done = add_run(runs, one, parent);
            tells |= parent != slots[one];
        }
    }
    PyObject *made = !done ? NULL : tells ? PyList_AsTuple(runs) : owned(python.no_ids);
    Py_XDECREF(runs);
    return made;
}

/* ------------------------------------------------------------------------------------- the events */

/* Raise an error: the clock, the log or a listener has changed the ledger since the checks. */
static bool changed_amid(void)
{
    PyErr_SetString(PyExc_RuntimeError, "the ledger was changed while a call was planning a store");
    return false;
}

/* Emit that the resident blocks are used. */
static bool touch_residents(Offer *offer)
{
    PyObject *slots = packed(offer->slots, offer->residents), *ended = NULL;
    PyObject *runs = runs_of(offer, offer->places, offer->slots, offer->residents, true);
    PyObject *const values[] = {slots, runs};
    if (slots != NULL && runs != NULL)
        ended = emitted(offer->call, python.kinds[KIND_BlocksTouched], values, 2);
    Py_XDECREF(slots);
    Py_XDECREF(runs);
    Py_XDECREF(ended);
    return ended != NULL;
}

/* Find the next victims: the first blocks in the eviction order that are not offered. `has_room` has counted them. */
static bool next_victims(Offer *offer, Py_ssize_t count, int64_t *victims)
{
    Folding *look = &offer->call->look;
    const SlotQueue *order = lru_queue(field(look, N_policy));
    const int32_t offered = offer->residents > 0 ? begin_marks(look, order->capacity) : 1;
    if (offered == 0) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t one = 0; one < offer->residents; one++)
        look->fold->mark[offer->slots[one]] = offered;
    Py_ssize_t found = 0;
    for (int32_t slot = queue_behind(order, -1); slot >= 0 && found < count; slot = queue_behind(order, slot))
        if (offer->residents == 0 || look->fold->mark[slot] != offered)
            victims[found++] = slot;
    return true;
}

static PyObject *keys_of(const Offer *offer, const int64_t *slots, Py_ssize_t count)
{
    PyObject *keys = PyTuple_New(count);
    for (Py_ssize_t one = 0; keys != NULL && one < count; one++) {
        PyObject *key = PyList_GetItem(index_now(offer)->key_of, (Py_ssize_t)slots[one]);
        if (key == NULL)
            Py_CLEAR(keys);
        else
            PyTuple_SetItem(keys, one, owned(key));
    }
    return keys;
}

/* Evict as many blocks as free slots are lacking for the new keys (`_evict`). Returns the evicted keys; owned. */
static PyObject *make_room(Offer *offer)
{
    const int64_t lacking = offer->news - free_queue(&offer->call->look)->size;
    int64_t *victims = offer->slots + offer->residents, seq; /* free to use: the new keys have no slots yet */
    if (lacking <= 0)
        return owned(python.no_ids);
    if (!next_victims(offer, (Py_ssize_t)lacking, victims) || !field_number(&offer->call->look, N_seq, &seq))
        return NULL;
    PyObject *keys = keys_of(offer, victims, (Py_ssize_t)lacking), *slots = packed(victims, (Py_ssize_t)lacking);
    PyObject *plan = PyLong_FromLongLong(seq + 2), *ended = NULL;
    PyObject *const values[] = {slots, python.no_ids, plan};
    if (keys != NULL && slots != NULL && plan != NULL)
        ended = emitted(offer->call, python.kinds[KIND_BlocksEvicted], values, 3);
    if (ended == NULL)
        Py_CLEAR(keys);
    Py_XDECREF(slots);
    Py_XDECREF(plan);
    Py_XDECREF(ended);
    return keys;
}

/* Give each new key one of the first free slots. */
static bool take_slots(Offer *offer)
{
    const SlotQueue *free_slots = free_queue(&offer->call->look);
    int32_t slot = -1;
    if (free_slots == NULL || free_slots->size < offer->news)
        return changed_amid();
    for (Py_ssize_t one = offer->residents; one < offer->residents + offer->news; one++) {
        slot = queue_behind(free_slots, slot);
        offer->slots[one] = offer->slot_of[offer->places[one]] = slot;
    }
    return true;
}

/* The owners of the new keys (`_owners_of`); owned. */
static PyObject *owners_of(const Offer *offer)
{
    const int64_t *places = offer->places + offer->residents;
    PyObject *owners = PyList_New(0);
    Py_ssize_t end = 0, one = 0;
    for (Py_ssize_t owner = 0; owners != NULL && owner < PyTuple_Size(offer->owners); owner++) {
        PyObject *pair = PyTuple_GetItem(offer->owners, owner);
        const Py_ssize_t first = one;
        end += PyLong_AsSsize_t(PyTuple_GetItem(pair, 1));
        while (one < offer->news && places[one] < end)
            one++;
        PyObject *count = one > first ? PyLong_FromSsize_t(one - first) : owned(Py_None);
        PyObject *left = count == NULL ? NULL : PyTuple_Pack(2, PyTuple_GetItem(pair, 0), count);
        if (left == NULL || (one > first && PyList_Append(owners, left) < 0))
            Py_CLEAR(owners);
        Py_XDECREF(count);
        Py_XDECREF(left);
    }
    PyObject *all = owners == NULL ? NULL : PyList_AsTuple(owners);
    Py_XDECREF(owners);
    return all;
}

/* Move the device blocks of the new keys to the front of `sources`. Returns the new keys as a tuple; owned. */
static PyObject *only_new(Offer *offer)
{
    PyObject *keys = PyTuple_New(offer->news);
    for (Py_ssize_t one = 0; keys != NULL && one < offer->news; one++) {
        const int64_t place = offer->places[offer->residents + one];
        memmove(offer->sources + one * offer->chunk, offer->sources + place * offer->chunk,
                (size_t)offer->chunk * sizeof *offer->sources);
        PyTuple_SetItem(keys, one, owned(key_at(offer, (Py_ssize_t)place)));
    }
    return keys;
}

PyObject *host_blocks(const int64_t *slots, Py_ssize_t count, int64_t chunk)
{
    count *= (Py_ssize_t)chunk;
    int64_t *blocks = PyMem_Malloc((size_t)count * sizeof *blocks);
    for (Py_ssize_t one = 0; blocks != NULL && one < count; one++)
        blocks[one] = slots[one / chunk] * chunk + one % chunk;
    PyObject *hosts = blocks == NULL ? PyErr_NoMemory() : packed(blocks, count);
    PyMem_Free(blocks);
    return hosts;
}

/* Plan the store of the new keys (`_plan_store`). Returns its job; owned. */
static PyObject *plan_store(Offer *offer, PyObject *owners, PyObject *keys)
{
    const int64_t *places = offer->places + offer->residents, *new_slots = offer->slots + offer->residents;
    PyObject *slots = packed(new_slots, offer->news), *ended = NULL, *seq = NULL, *hosts = NULL, *job = NULL;
    PyObject *blocks = packed(offer->sources, offer->news * (Py_ssize_t)offer->chunk);
    PyObject *runs = runs_of(offer, places, new_slots, offer->news, false);
    PyObject *const values[] = {owners, keys, slots, blocks, python.empty_text, runs};
    if (slots != NULL && blocks != NULL && runs != NULL)
        ended = emitted(offer->call, python.kinds[KIND_StorePlanned], values, 6);
    if (ended != NULL)
        hosts = offer->chunk == 1 ? owned(slots) : host_blocks(new_slots, offer->news, offer->chunk);
    if (hosts != NULL && (seq = of_ledger(offer->call, N_seq)) != NULL)
        job = PyObject_CallFunctionObjArgs(of_python.job_made, seq, python.store, blocks, hosts, NULL);
    Py_XDECREF(slots);
    Py_XDECREF(blocks);
    Py_XDECREF(runs);
    Py_XDECREF(ended);
    Py_XDECREF(seq);
    Py_XDECREF(hosts);
    return job;
}

/* ------------------------------------------------------------------------------------- the result */

/* The places of the new keys: a range if all are new, as in Python. */
static PyObject *places_stored(const Offer *offer)
{
    if (offer->residents == 0)
        return PyObject_CallFunction((PyObject *)&PyRange_Type, "n", offer->count);
    PyObject *places = PyList_New(offer->news);
    for (Py_ssize_t one = 0; places != NULL && one < offer->news; one++) {
        PyObject *place = PyLong_FromLongLong(offer->places[offer->residents + one]);
        if (place == NULL)
            Py_CLEAR(places);
        else
            PyList_SetItem(places, one, place);
    }
    return places;
}

/* A `PreparedStore` with nothing deferred or refused; owned. */
static PyObject *prepared(const Offer *offer, PyObject *job, PyObject *keys, PyObject *evicted, PyObject *places)
{
    PyObject *residents = PyLong_FromSsize_t(offer->residents), *made = NULL;
    if (residents != NULL)
        made = PyObject_CallFunctionObjArgs(of_python.prepared_made, job, keys, python.no_ids, residents, evicted,
                                            places, NULL);
    Py_XDECREF(residents);
    return made;
}

/* Store the new keys of an offer for which there is room. */
static PyObject *store_new(Offer *offer)
{
    const bool are_all = offer->residents == 0;
    PyObject *evicted = make_room(offer), *owners = NULL, *keys = NULL, *job = NULL, *places = NULL, *made = NULL;
    if (evicted != NULL && take_slots(offer)) {
        owners = are_all ? owned(offer->owners) : owners_of(offer);
        keys = are_all ? owned(offer->keys) : only_new(offer);
    }
    if (owners != NULL && keys != NULL)
        job = plan_store(offer, owners, keys);
    if (job != NULL && (places = places_stored(offer)) != NULL)
        made = prepared(offer, job, keys, evicted, places);
    Py_XDECREF(evicted);
    Py_XDECREF(owners);
    Py_XDECREF(keys);
    Py_XDECREF(job);
    Py_XDECREF(places);
    return made;
}

/* Store an offer whose keys, blocks, owners and parents are read (`_store`). */
static Verdict store_offer(Offer *offer)
{
    Call *call = offer->call;
    if (!is_plain(call) || !none_is_stale(call) || !find_keys(offer) || (offer->news > 0 && !has_room(offer)))
        return REFERENCE;
    if (offer->residents > 0 && !touch_residents(offer))
        return FAILED;
    if (offer->news > 0 && !(see_state(&call->look) && has_room(offer)) && !changed_amid())
        return FAILED;
    call->result = offer->news > 0 ? store_new(offer)
                                   : prepared(offer, Py_None, python.no_ids, python.no_ids, python.no_ids);
    return call->result == NULL ? FAILED : FOLDED;
}

/* The argument at this place or with this name; borrowed. NULL: it was not given. */
static PyObject *argument(const Call *call, Py_ssize_t place, const char *name)
{
    if (place < call->count)
        return call->arguments[place];
    for (Py_ssize_t one = 0; call->names != NULL && one < PyTuple_Size(call->names); one++)
        if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(call->names, one), name) == 0)
            return call->arguments[call->count + one];
    return NULL;
}

static bool begin_offer(Offer *offer, PyObject *keys, PyObject *blocks)
{
    return offer->call->folds && see_state(&offer->call->look) && take_keys(offer, keys) && take_memory(offer) &&
           take_sources(offer, blocks);
}

/* The key that the first block of `prepare_store` continues: the given one, or the last one of the request; owned.
   NULL: Python takes the call. */
static PyObject *parent_given(Call *call, PyObject *request, PyObject *given, PyObject *keys)
{
    if (given != NULL && given != Py_None)
        return is_key(given) ? owned(given) : NULL;
    PyObject *last_keys = of_core(call, N_last_keys);
    PyObject *parent = last_keys == NULL ? NULL : PyDict_GetItemWithError(last_keys, request);
    parent = owned(parent != NULL ? parent : of_python.no_key);
    Py_XDECREF(last_keys);
    const int repeats = PySequence_Contains(keys, parent);
    if (repeats > 0) { /* the request repeats an offer, so its last key is no parent of it */
        Py_DECREF(parent);
        return owned(of_python.no_key);
    }
    if (repeats < 0 || !is_key(parent))
        Py_CLEAR(parent);
    return parent;
}

static PyObject *one_owner(PyObject *request, Py_ssize_t keys)
{
    PyObject *count = PyLong_FromSsize_t(keys), *owner = count == NULL ? NULL : PyTuple_Pack(2, request, count);
    PyObject *owners = owner == NULL ? NULL : PyTuple_Pack(1, owner);
    Py_XDECREF(count);
    Py_XDECREF(owner);
    return owners;
}

/* Store the offer of one request, and note its last key. */
static Verdict store_for(Offer *offer, PyObject *request, PyObject *parent)
{
    PyObject *owners = one_owner(request, offer->count);
    Verdict verdict = owners != NULL && take_owners(offer, owners, parent) ? store_offer(offer) : REFERENCE;
    Py_XDECREF(owners);
    PyObject *last_keys = verdict == FOLDED ? of_core(offer->call, N_last_keys) : NULL;
    if (verdict == FOLDED &&
        (last_keys == NULL || PyDict_SetItem(last_keys, request, key_at(offer, offer->count - 1)) < 0)) {
        Py_CLEAR(offer->call->result);
        verdict = FAILED;
    }
    Py_XDECREF(last_keys);
    return verdict;
}

Verdict prepare_store(Call *call)
{
    PyObject *const *given = call->arguments, *parent = argument(call, 3, "parent");
    Offer offer = {.call = call};
    const Py_ssize_t named = call->names == NULL ? 0 : PyTuple_Size(call->names);
    Verdict verdict = REFERENCE;
    if (call->count < 3 || call->count + named > 4 || (named > 0 && parent == NULL) || !is_name(given[0]))
        return REFERENCE;
    if (begin_offer(&offer, given[1], given[2]) &&
        (parent = parent_given(call, given[0], parent, offer.keys)) != NULL) {
        verdict = store_for(&offer, given[0], parent);
        Py_DECREF(parent);
    }
    offer_end(&offer);
    return verdict;
}

static bool is_collection(PyObject *object)
{
    return object == NULL || PyTuple_CheckExact(object) || PyAnySet_CheckExact(object);
}

/* Whether the named arguments of `store` exist, and were not given by their place too. */
static bool are_known(const Call *call)
{
    static const char *const names[] = {"again", "spared", "parents", "required"};
    for (Py_ssize_t one = 0; call->names != NULL && one < PyTuple_Size(call->names); one++) {
        bool is_known = false;
        for (size_t name = (size_t)call->count - 3; name < sizeof names / sizeof *names; name++)
            is_known |= PyUnicode_CompareWithASCIIString(PyTuple_GetItem(call->names, one), names[name]) == 0;
        if (!is_known)
            return false;
    }
    return true;
}

Verdict store(Call *call)
{
    PyObject *const *given = call->arguments;
    Offer offer = {.call = call};
    if (call->count < 3 || call->count > 7 || !are_known(call))
        return REFERENCE;
    PyObject *again = argument(call, 3, "again"), *spared = argument(call, 4, "spared");
    PyObject *parents = argument(call, 5, "parents");
    if (!is_collection(again) || !is_collection(spared) || (spared != NULL && PyObject_Size(spared) > 0))
        return REFERENCE;
    Verdict verdict = REFERENCE;
    if (begin_offer(&offer, given[1], given[2]) && take_owners(&offer, given[0], of_python.no_key) &&
        (parents == NULL || take_parents(&offer, parents)))
        verdict = store_offer(&offer);
    offer_end(&offer);
    return verdict;
}

/* ------------------------------------------------------------------------------------ cursors, and rewrites */

/* Whether this is a request with its cursors: (request, settled, offered). */
static bool is_offer(PyObject *offer)
{
    int64_t number;
    if (!PyTuple_CheckExact(offer) || PyTuple_Size(offer) != 3 || !is_name(PyTuple_GetItem(offer, 0)))
        return false;
    for (Py_ssize_t part = 1; part < 3; part++) {
        PyObject *cursors = PyTuple_GetItem(offer, part);
        if (!PyTuple_CheckExact(cursors))
            return false;
        for (Py_ssize_t one = 0; one < PyTuple_Size(cursors); one++)
            if (!read_number(PyTuple_GetItem(cursors, one), &number))
                return false;
    }
    return true;
}

Verdict advance_cursors(Call *call)
{
    if (call->names != NULL || call->count != 1 ||
        !(PyList_CheckExact(call->arguments[0]) || PyTuple_CheckExact(call->arguments[0])))
        return REFERENCE;
    PyObject *offers = PySequence_Tuple(call->arguments[0]);
    bool fit = offers != NULL;
    for (Py_ssize_t one = 0; fit && one < PyTuple_Size(offers); one++)
        fit = is_offer(PyTuple_GetItem(offers, one));
    Verdict verdict = REFERENCE;
    if (fit)
        verdict = PyTuple_Size(offers) == 0 ? returns_none(call) : emitted_alone(call, KIND_BlocksOffered, &offers, 1);
    Py_XDECREF(offers);
    return verdict;
}

/* Only if no content of device blocks matters: then it is not asked which blocks they are. */
Verdict rewrite(Call *call)
{
    PyObject *provenance = field(&call->look, N_provenance), *brought = NULL;
    int64_t chunk;
    if (call->names != NULL || call->count != 1 || !none_is_stale(call) ||
        !configured(call, N_blocks_per_chunk, &chunk))
        return REFERENCE;
    if (chunk > 1)
        brought = attribute_of(provenance, N_brought);
    const bool matters = chunk > 1 && (brought == NULL || !is_empty(brought));
    Py_XDECREF(brought);
    return matters ? REFERENCE : returns_none(call);
}
