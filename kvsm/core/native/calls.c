/* The calls of a core that an engine makes for each request: their common cases (kvsm/core/offloader/). */

#include "calls.h"

typedef Verdict (*Body)(Call *);

/* ------------------------------------------------------------------------------- what a call looks at */

/* Whether this is a valid name of a request, which a log can hold. */
bool is_name(PyObject *text)
{
    if (PyUnicode_CheckExact(text) && PyUnicode_AsUTF8AndSize(text, NULL) != NULL)
        return true;
    PyErr_Clear();
    return false;
}

/* The record of a request; owned. NULL without an error: there is none. */
static PyObject *known(Call *call, PyObject *request)
{
    return owned(PyDict_GetItemWithError(field(&call->look, N_requests), request));
}

/* ---------------------------------------------------------------------------------- batches of an event */

/* Numbers for an event. Large batches have their own memory. */
typedef struct {
    Batch batch; /* `object` is NULL */
    int64_t *many;
} Numbers;

/* Memory for this many; false: an error is set. */
static bool numbers_begin(Numbers *numbers, Py_ssize_t most)
{
    numbers->many = most <= SMALL ? NULL : PyMem_Malloc((size_t)most * sizeof *numbers->many);
    numbers->batch.ids = most <= SMALL ? numbers->batch.small : numbers->many;
    numbers->batch.count = 0;
    if (numbers->batch.ids == NULL)
        PyErr_NoMemory();
    return numbers->batch.ids != NULL;
}

static void numbers_add(Numbers *numbers, int64_t number)
{
    int64_t *all = numbers->many == NULL ? numbers->batch.small : numbers->many;
    all[numbers->batch.count++] = number;
}

static void numbers_end(Numbers *numbers) { PyMem_Free(numbers->many); }

/* As `pack` in Python. */
PyObject *packed(const int64_t *ids, Py_ssize_t count)
{
    PyObject *made = count <= SMALL ? ids_object(ids, count) : packed_ids(ids, count);
    if (made == Py_None) /* one fits in no 32 bits */
        Py_CLEAR(made);
    return made;
}

/* --------------------------------------------------------------------------------------- matching.py */

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

/* Whether the request holds nothing, and may hold the slots now: it may not if one is being stored. A request
   without an entry is new. */
static bool may_pin(Call *call, PyObject *request, const Batch *slots, int *state)
{
    Folding *look = &call->look;
    PyObject *record = known(call, request);
    int64_t load = 0, word = 0;
    const bool fits = record == NULL || (get_number(record, N_load, &load) && get_number(record, N_word, &word));
    Py_XDECREF(record);
    if (!fits)
        return false;
    *state = state_of((int32_t)word);
    const bool holds_nothing = *state == REQUEST_NEW || *state == REQUEST_RUNNING || *state == REQUEST_PREEMPTED;
    return load == 0 && holds_nothing && next_words(look, &look->fold->blocks, &BLOCK, BLOCK_PIN, slots) != NULL &&
           are_distinct(look, slots, look->fold->blocks.size);
}

/* The next store of the request may continue this block. */
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

/* Pin the slots for the request (`_pin`). */
static bool pin(Call *call, PyObject *request, PyObject *slots, PyObject *missed, int64_t asked, int64_t on_host)
{
    PyObject *all = PyLong_FromLongLong(asked), *here = PyLong_FromLongLong(on_host), *ended = NULL;
    PyObject *const values[] = {request, slots, missed, all, Py_None, here};
    if (slots != NULL && all != NULL && here != NULL)
        ended = emitted(call, python.kinds[KIND_HitMatched], values, 6);
    Py_XDECREF(all);
    Py_XDECREF(here);
    Py_XDECREF(ended);
    return ended != NULL;
}

static Verdict match_prefix(Call *call, PyObject *request, PyObject *keys, Numbers *prefix)
{
    const Py_ssize_t count = PyObject_Size(keys);
    const Batch *slots = &prefix->batch;
    PyObject *missed;
    int64_t chunk;
    int state;
    if (!configured(call, N_blocks_per_chunk, &chunk) ||
        readable_prefix(call, keys, prefix, &missed) != FOLDED || !may_pin(call, request, slots, &state))
        return REFERENCE;
    if (state != REQUEST_RUNNING || slots->count > 0) {
        PyObject *ids = packed(slots->ids, slots->count);
        Py_INCREF(missed); /* who has the keys may drop them while the clock is asked */
        const bool done = pin(call, request, ids, missed, count * chunk, slots->count * chunk);
        Py_DECREF(missed);
        Py_XDECREF(ids);
        if (!done || (slots->count > 0 && !note_last(call, request, keys, slots->count)))
            return FAILED;
    }
    PyObject *hits = PyLong_FromSsize_t(slots->count);
    call->result = hits == NULL ? NULL : PyObject_CallFunctionObjArgs(of_python.match_made, hits, NULL);
    Py_XDECREF(hits);
    return call->result == NULL ? FAILED : FOLDED;
}

static Verdict match(Call *call)
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

/* --------------------------------------------------------------------------------------- transfers.py */

/* The device blocks that a call names (`checked_device_blocks`), in the form of an event; owned. NULL: Python checks
   them. */
static PyObject *checked_device_blocks(Call *call, PyObject *given, Py_ssize_t *count)
{
    Numbers blocks;
    int64_t limit, block;
    PyObject *all = PyTuple_CheckExact(given) ? owned(given) : NULL, *made = NULL;
    if (PyList_CheckExact(given) || PyRange_Check(given))
        all = PySequence_Tuple(given);
    if (all == NULL)
        return NULL;
    *count = PyTuple_Size(all);
    bool fit = configured(call, N_device_blocks, &limit) && numbers_begin(&blocks, *count);
    if (fit) {
        for (Py_ssize_t one = 0; fit && one < *count; one++) {
            fit = read_number(PyTuple_GetItem(all, one), &block) && block < limit;
            if (fit)
                numbers_add(&blocks, block);
        }
        if (fit)
            made = *count <= SMALL ? owned(all) : packed(blocks.batch.ids, *count);
        numbers_end(&blocks);
    }
    Py_DECREF(all);
    return made;
}

/* The first `wanted` pins of a request's match, in the form of an event; owned. NULL: the match has fewer pins, or a
   pin may no longer hold. hosts: set to their host blocks; owned. */
static PyObject *pins_of(Call *call, PyObject *request, Py_ssize_t wanted, int64_t chunk, PyObject **hosts)
{
    PyObject *record = known(call, request), *slots = NULL;
    Batch pins;
    int64_t word;
    const bool fits = record != NULL && get_number(record, N_word, &word) &&
                      state_of((int32_t)word) == REQUEST_MATCHED && live_pins(&call->look, record, &pins);
    Py_XDECREF(record);
    if (!fits)
        return NULL;
    if (wanted <= pins.count)
        slots = wanted == pins.count && wanted <= SMALL ? owned(pins.object) : packed(pins.ids, wanted);
    if (slots != NULL && (*hosts = chunk == 1 ? owned(slots) : host_blocks(pins.ids, wanted, chunk)) == NULL)
        Py_CLEAR(slots);
    batch_clear(&pins);
    return slots;
}

/* Emit the event of a load of whole slots, and return its job. */
static Verdict plan_load(Call *call, PyObject *request, PyObject *slots, PyObject *blocks, PyObject *hosts)
{
    PyObject *const values[] = {request, slots, blocks, Py_False, python.no_ids, python.empty_text};
    PyObject *ended = emitted(call, python.kinds[KIND_LoadPlanned], values, 6);
    PyObject *seq = ended == NULL ? NULL : of_ledger(call, N_seq);
    if (seq != NULL)
        call->result = PyObject_CallFunctionObjArgs(of_python.job_made, seq, python.load, blocks, hosts, NULL);
    Py_XDECREF(ended);
    Py_XDECREF(seq);
    return call->result == NULL ? FAILED : FOLDED;
}

/* Whether a lower tier listens for uses. Then Python handles the call. */
static bool uses_are_heard(Call *call)
{
    PyObject *hearer = of_core(call, N_using);
    Py_XDECREF(hearer); /* the core has it */
    return hearer != Py_None;
}

static Verdict prepare_load(Call *call)
{
    PyObject *const *given = call->arguments;
    Py_ssize_t wanted;
    int64_t chunk, most;
    if (call->names != NULL || call->count < 2 || call->count > 3 || !is_name(given[0]) ||
        (call->count == 3 && !(PyTuple_CheckExact(given[2]) && is_empty(given[2]))) ||
        field(&call->look, N_kept) != Py_None || /* then the job has keys and generations */
        !configured(call, N_blocks_per_chunk, &chunk) || chunk == 0 || !configured(call, N_max_live_transfers, &most) ||
        PyDict_Size(field(&call->look, N_transfers)) >= most || uses_are_heard(call))
        return REFERENCE;
    PyObject *blocks = checked_device_blocks(call, given[1], &wanted), *slots = NULL, *hosts = NULL;
    if (blocks != NULL && wanted > 0 && wanted % chunk == 0)
        slots = pins_of(call, given[0], wanted / (Py_ssize_t)chunk, chunk, &hosts);
    const Verdict verdict = slots == NULL ? REFERENCE : plan_load(call, given[0], slots, blocks, hosts);
    Py_XDECREF(blocks);
    Py_XDECREF(slots);
    Py_XDECREF(hosts);
    return verdict;
}

/* Whether a report counts (`_why_reject`). false: Python decides. */
static bool counts(Call *call, PyObject *transfer, PyObject *worker, PyObject *direction)
{
    int64_t number, workers, word, reported;
    if (!PyLong_CheckExact(transfer) || !read_number(worker, &number) || number >= 62)
        return false;
    PyObject *record = owned(PyDict_GetItemWithError(field(&call->look, N_transfers), transfer)), *way = NULL;
    bool fits = record != NULL && configured(call, N_workers, &workers) && number < workers && get_number(record, N_word, &word) &&
                state_of((int32_t)word) != TRANSFER_PLANNED && get_number(record, N_reported, &reported) &&
                !(reported >> number & 1) && (way = attribute_of(record, N_direction)) != NULL;
    fits = fits && (direction == NULL || way == direction);
    Py_XDECREF(way);
    Py_XDECREF(record);
    return fits;
}

/* The request of a load; "" of a store. Owned. */
static PyObject *loaded_for(PyObject *record, PyObject *direction)
{
    if (direction != python.load)
        return owned(python.empty_text);
    PyObject *owners = attribute_of(record, N_owners);
    PyObject *first = owners == NULL ? NULL : PySequence_GetItem(owners, 0);
    PyObject *request = first == NULL ? NULL : PySequence_GetItem(first, 0);
    Py_XDECREF(owners);
    Py_XDECREF(first);
    return request;
}

static PyObject *ended_by(PyObject *record)
{
    PyObject *id = attribute_of(record, N_id), *keys = attribute_of(record, N_keys);
    PyObject *direction = attribute_of(record, N_direction), *request = loaded_for(record, direction);
    PyObject *device_blocks = attribute_of(record, N_device_blocks), *ended = NULL;
    int64_t word;
    if (id != NULL && keys != NULL && direction != NULL && request != NULL && device_blocks != NULL &&
        get_number(record, N_word, &word)) {
        const int state = state_of((int32_t)word);
        ended = PyObject_CallFunctionObjArgs(of_python.ended_made, id, direction, request,
                                             state == TRANSFER_COMPLETED ? Py_True : Py_False, device_blocks,
                                             state == TRANSFER_LOST ? Py_True : Py_False, keys, NULL);
    }
    Py_XDECREF(id);
    Py_XDECREF(keys);
    Py_XDECREF(direction);
    Py_XDECREF(request);
    Py_XDECREF(device_blocks);
    return ended;
}

/* Report the end of this transfer to the publisher and the caller (`_ended`). */
static PyObject *ended_result(Call *call, PyObject *record)
{
    PyObject *publisher = of_core(call, N_publisher), *told = owned(Py_None), *result = NULL;
    if (publisher != NULL && publisher != Py_None) {
        PyObject *id = attribute_of(record, N_id);
        Py_DECREF(told);
        told = id == NULL ? NULL : PyObject_CallMethodObjArgs(publisher, name_of(N_ended), id, NULL);
        Py_XDECREF(id);
    }
    PyObject *ended = publisher == NULL || told == NULL ? NULL : ended_by(record);
    if (ended != NULL)
        result = PyObject_CallFunctionObjArgs(of_python.result_made, ended, NULL);
    Py_XDECREF(publisher);
    Py_XDECREF(told);
    Py_XDECREF(ended);
    return result;
}

/* A good report of a worker that is expected. */
static Verdict report_good(Call *call, PyObject *transfer, PyObject *worker, PyObject *direction, PyObject *queued,
                           PyObject *copied)
{
    if (!counts(call, transfer, worker, direction))
        return REFERENCE;
    PyObject *const values[] = {transfer, worker, Py_True, python.empty_text, queued, copied};
    PyObject *ended = emitted(call, python.kinds[KIND_WorkerReported], values, 6);
    if (ended == NULL)
        return FAILED;
    call->result = ended == Py_None ? owned(of_python.counted) : ended_result(call, ended);
    Py_DECREF(ended);
    return call->result == NULL ? FAILED : FOLDED;
}

/* Whether this is a duration in microseconds, or None (`_duration`). */
static bool is_duration(PyObject *value)
{
    int64_t us;
    if (value == Py_None)
        return true;
    if (!PyLong_CheckExact(value))
        return false;
    us = PyLong_AsLongLong(value);
    if (us == -1)
        PyErr_Clear(); /* it may be too large */
    return us >= 0;
}

static Verdict report(Call *call)
{
    PyObject *const *given = call->arguments;
    PyObject *queued = call->count > 4 ? given[4] : Py_None, *copied = call->count > 5 ? given[5] : Py_None;
    if (call->names != NULL || call->count < 3 || call->count > 6 || given[2] != Py_True ||
        (call->count > 3 && !PyUnicode_CheckExact(given[3])) || !is_duration(queued) || !is_duration(copied))
        return REFERENCE;
    return report_good(call, given[0], given[1], NULL, queued, copied);
}

static Verdict complete(Call *call, PyObject *direction)
{
    PyObject *const *given = call->arguments;
    if (call->names != NULL || call->count < 1 || call->count > 2)
        return REFERENCE;
    PyObject *worker = call->count == 2 ? given[1] : python.zero;
    return report_good(call, given[0], worker, direction, Py_None, Py_None);
}

static Verdict complete_load(Call *call) { return complete(call, python.load); }

static Verdict complete_store(Call *call) { return complete(call, python.store); }

/* --------------------------------------------------------------------------------------- offloader.py */

/* Whether the other arguments, if there are any, say that the request was not aborted. */
static bool not_aborted(Call *call)
{
    if (call->names == NULL)
        return true;
    return PyTuple_Size(call->names) == 1 && same_text(PyTuple_GetItem(call->names, 0), name_of(N_aborted)) &&
           call->arguments[call->count] == Py_False;
}

static Verdict finish(Call *call)
{
    int64_t word;
    if (call->count != 1 || !not_aborted(call) || !is_name(call->arguments[0]))
        return REFERENCE;
    PyObject *request = call->arguments[0], *record = known(call, request);
    const bool lives =
        record != NULL && get_number(record, N_word, &word) && state_of((int32_t)word) != REQUEST_FINISHED;
    Py_XDECREF(record);
    if (!lives)
        return REFERENCE;
    PyObject *const values[] = {request, Py_False};
    PyObject *ended = emitted(call, python.kinds[KIND_RequestFinished], values, 2);
    Py_XDECREF(ended);
    PyObject *last_keys = ended == NULL ? NULL : of_core(call, N_last_keys);
    if (last_keys != NULL && PyDict_GetItemWithError(last_keys, request) != NULL)
        PyDict_DelItem(last_keys, request);
    Py_XDECREF(last_keys);
    PyObject *requests = ended == NULL ? NULL : of_ledger(call, N_requests);
    const int is_known = requests == NULL ? -1 : PySequence_Contains(requests, request);
    Py_XDECREF(requests);
    if (is_known < 0)
        return FAILED;
    call->result = PyBool_FromLong(!is_known);
    return FOLDED;
}

/* ---------------------------------------------------------------------------- the end of a step, and submissions */

/* Flush the log in Python. reason: a `LogFlush`. */
static bool flush_log(Call *call, PyObject *reason)
{
    PyObject *done = PyObject_CallMethodObjArgs(call->core, name_of(N_flush_log), reason, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* The ids of transfers as a tuple; owned. NULL: Python takes the call. */
static PyObject *transfer_ids(PyObject *given)
{
    if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given))
        return NULL;
    PyObject *ids = PySequence_Tuple(given);
    for (Py_ssize_t one = 0; ids != NULL && one < PyTuple_Size(ids); one++)
        if (!PyLong_CheckExact(PyTuple_GetItem(ids, one)))
            Py_CLEAR(ids);
    return ids;
}

static Verdict submit(Call *call)
{
    if (call->names != NULL || call->count != 1)
        return REFERENCE;
    PyObject *ids = transfer_ids(call->arguments[0]);
    if (ids == NULL || PyTuple_Size(ids) == 0) {
        Py_XDECREF(ids);
        return REFERENCE;
    }
    PyObject *ended = emitted(call, python.kinds[KIND_TransfersSubmitted], &ids, 1);
    Py_DECREF(ids);
    Py_XDECREF(ended);
    if (ended == NULL || !flush_log(call, of_python.jobs_leave))
        return FAILED;
    call->result = owned(Py_None);
    return FOLDED;
}

/* Add `more` to this number of the core. */
static bool count_in_core(Call *call, Name name, int64_t more)
{
    int64_t before;
    PyObject *number = of_core(call, name);
    const bool is_number = read_number(number, &before);
    Py_XDECREF(number);
    number = is_number ? PyLong_FromLongLong(before + more) : NULL;
    const bool done = number != NULL && PyDict_SetItem(call->fields, name_of(name), number) == 0;
    Py_XDECREF(number);
    return done;
}

/* Whether this step ends without a check for plans that were never submitted, which Python makes. emits: set to whether
   the step had an event; then its end is an event, too. */
static bool may_end_step(Call *call, bool *emits)
{
    int64_t step, last, until_look;
    PyObject *here = of_core(call, N_step), *before = of_ledger(call, N_step), *look = of_core(call, N_until_look);
    const bool fits = read_number(here, &step) && read_number(before, &last) && read_number(look, &until_look) &&
                      until_look > 1;
    Py_XDECREF(here);
    Py_XDECREF(before);
    Py_XDECREF(look);
    *emits = fits && step == last;
    return fits;
}

static Verdict end_step(Call *call)
{
    bool emits;
    if (call->names != NULL || call->count != 0 || !may_end_step(call, &emits))
        return REFERENCE;
    if (emits) {
        PyObject *ended = emitted(call, python.kinds[KIND_StepEnded], NULL, 0);
        Py_XDECREF(ended);
        if (ended == NULL || !flush_log(call, of_python.step_ended))
            return FAILED;
    }
    if (!count_in_core(call, N_step, 1) || !count_in_core(call, N_until_look, -1))
        return FAILED;
    call->result = owned(Py_None);
    return FOLDED;
}

/* ------------------------------------------------------------------------------------------ the type */

/* Run the call in Python, with the same arguments. */
static PyObject *left_to_python(const Call *call, PyObject *function)
{
    const Py_ssize_t named = call->names == NULL ? 0 : PyTuple_Size(call->names);
    PyObject *positional = PyTuple_New(1 + call->count), *others = named == 0 ? NULL : PyDict_New(), *result = NULL;
    bool done = positional != NULL && (named == 0 || others != NULL);
    if (done)
        PyTuple_SetItem(positional, 0, owned(call->core));
    for (Py_ssize_t one = 0; done && one < call->count; one++)
        PyTuple_SetItem(positional, 1 + one, owned(call->arguments[one]));
    for (Py_ssize_t one = 0; done && one < named; one++)
        done = PyDict_SetItem(others, PyTuple_GetItem(call->names, one), call->arguments[call->count + one]) == 0;
    if (done)
        result = PyObject_Call(function, positional, others);
    Py_XDECREF(positional);
    Py_XDECREF(others);
    return result;
}

static PyObject *called(Body body, PyObject *function, PyObject *core, PyObject *const *arguments, Py_ssize_t count,
                        PyObject *names)
{
    Call call = {.core = core, .arguments = arguments, .count = count, .names = names};
    if (function == NULL)
        return PyErr_Format(PyExc_RuntimeError, "the native body is not connected; import kvsm.core.offloader first");
    const Verdict verdict = begin_call(&call) ? body(&call) : REFERENCE;
    end_call(&call);
    if (verdict != REFERENCE)
        return call.result;
    PyErr_Clear();
    return left_to_python(&call, function);
}

#define CALL(name)                                                                                               \
    static PyObject *py_##name(PyObject *core, PyObject *const *arguments, Py_ssize_t count, PyObject *names)    \
    {                                                                                                            \
        return called(name, of_python.name, core, arguments, count, names);                                      \
    }

CALL(emit)
CALL(match)
CALL(prepare_store)
CALL(store)
CALL(prepare_load)
CALL(report)
CALL(complete_load)
CALL(complete_store)
CALL(finish)
CALL(submit)
CALL(end_step)

#define METHOD(name)                                                                                             \
    {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL | METH_KEYWORDS, "As `" #name "` in Python."}

static PyMethodDef methods[] = {
    METHOD(emit),   METHOD(match),         METHOD(prepare_store),  METHOD(store),  METHOD(prepare_load),
    METHOD(report), METHOD(complete_load), METHOD(complete_store), METHOD(finish), METHOD(submit), METHOD(end_step), {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The native part of a core: the calls that an engine makes for each request."},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec core_spec = {
    .name = "kvsm.core.native._body.CoreBody",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

/* connect_core(Offloader, Match, PreparedStore, TransferJob, Ended, ReportResult, recorded_ns, described, time_ns, NativeLedger,
   IllegalTransition, InvalidEvent, NOBODY, THE_LOG, KEY_BYTES_MAX, JOBS_LEAVE, STEP_ENDED): take what the calls need of Python. */
PyObject *connect_core(PyObject *module, PyObject *arguments)
{
    (void)module;
    OfPython of = {0};
    /* In the order of `methods`, and of the arguments. */
    PyObject **const functions[] = {&of.emit,   &of.match,         &of.prepare_store,  &of.store, &of.prepare_load,
                                    &of.report, &of.complete_load, &of.complete_store, &of.finish, &of.submit, &of.end_step};
    PyObject **const others[] = {&of.match_made,         &of.prepared_made, &of.job_made,   &of.ended_made,
                                 &of.result_made,        &of.recorded_ns,        &of.described,     &of.time_ns,    &of.native_ledger,
                                 &of.illegal_transition, &of.invalid_event, &of.nobody,     &of.the_log,
                                 &of.key_bytes_max, &of.jobs_leave, &of.step_ended};
    const Py_ssize_t num_others = sizeof others / sizeof *others;
    if (PyTuple_Size(arguments) != 1 + num_others)
        return PyErr_Format(PyExc_TypeError, "connect_core takes %zd arguments", 1 + num_others);
    for (size_t one = 0; one < sizeof functions / sizeof *functions; one++)
        if ((*functions[one] = PyObject_GetAttrString(PyTuple_GetItem(arguments, 0), methods[one].ml_name)) == NULL)
            return NULL;
    for (Py_ssize_t one = 0; one < num_others; one++)
        *others[one] = owned(PyTuple_GetItem(arguments, 1 + one));
    of.one = PyLong_FromLong(1);
    of.no_key = PyBytes_FromString("");
    of.counted = PyObject_CallFunctionObjArgs(of.result_made, NULL);
    if (of.one == NULL || of.no_key == NULL || of.counted == NULL || !PyLong_CheckExact(of.key_bytes_max) ||
        !is_ledger_class(of.native_ledger))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "the limit of a key is an int");
    of_python = of; /* in one assignment */
    Py_RETURN_NONE;
}
