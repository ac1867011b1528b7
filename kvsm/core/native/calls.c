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

bool known(Call *call, PyObject *request, PyObject **record)
{
    *record = owned(PyDict_GetItemWithError(field(&call->look, N_requests), request));
    return *record != NULL || !PyErr_Occurred();
}

Verdict returns_none(Call *call)
{
    call->result = owned(Py_None);
    return FOLDED;
}

/* ---------------------------------------------------------------------------------- batches of an event */

bool numbers_begin(Numbers *numbers, Py_ssize_t most)
{
    numbers->many = most <= SMALL ? NULL : PyMem_Malloc((size_t)most * sizeof *numbers->many);
    numbers->batch.ids = most <= SMALL ? numbers->batch.small : numbers->many;
    numbers->batch.object = NULL;
    numbers->batch.count = 0;
    if (numbers->batch.ids == NULL)
        PyErr_NoMemory();
    return numbers->batch.ids != NULL;
}

void numbers_add(Numbers *numbers, int64_t number)
{
    int64_t *all = numbers->many == NULL ? numbers->batch.small : numbers->many;
    all[numbers->batch.count++] = number;
}

void numbers_end(Numbers *numbers) { PyMem_Free(numbers->many); }

/* As `pack` in Python. */
PyObject *packed(const int64_t *ids, Py_ssize_t count)
{
    PyObject *made = count <= SMALL ? ids_object(ids, count) : packed_ids(ids, count);
    if (made == Py_None) /* one fits in no 32 bits */
        Py_CLEAR(made);
    return made;
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
    PyObject *record, *slots = NULL;
    Batch pins;
    int64_t word;
    const bool fits = known(call, request, &record) && record != NULL && get_number(record, N_word, &word) &&
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

/* Give this report to the core. Returns the result; owned. */
static PyObject *report_one(PyObject *core, PyObject *given)
{
    static const Name fields[] = {N_transfer, N_worker, N_good, N_error, N_queued_us, N_copied_us};
    PyObject *values[6] = {NULL};
    Call call = {.core = core, .arguments = values, .count = 6};
    bool read = true;
    for (int one = 0; read && one < 6; one++)
        read = (values[one] = attribute_of(given, fields[one])) != NULL;
    /* If a program has replaced `report` on this core, its function is called. */
    const bool is_native =
        read && begin_call(&call) && PyDict_GetItemWithError(call.fields, name_of(N_report)) == NULL;
    const Verdict verdict = is_native ? report(&call) : REFERENCE;
    end_call(&call);
    if (read && verdict == REFERENCE) {
        PyErr_Clear();
        call.result = PyObject_CallMethodObjArgs(core, name_of(N_report), values[0], values[1], values[2], values[3],
                                                 values[4], values[5], NULL);
    }
    for (int one = 0; one < 6; one++)
        Py_XDECREF(values[one]);
    return call.result;
}

/* Give the caller the transfer that a report has ended, if there is one. */
static bool note_end(PyObject *result, PyObject *note)
{
    if (result == NULL || result == of_python.counted)
        return result != NULL;
    PyObject *ended = attribute_of(result, N_ended), *noted = owned(ended);
    if (ended != NULL && ended != Py_None) {
        Py_DECREF(noted);
        noted = PyObject_CallFunctionObjArgs(note, ended, NULL);
    }
    Py_XDECREF(ended);
    Py_XDECREF(noted);
    return noted != NULL;
}

static Verdict report_all(Call *call)
{
    PyObject *const *given = call->arguments;
    if (call->names != NULL || call->count != 2 || !(PyList_CheckExact(given[0]) || PyTuple_CheckExact(given[0])))
        return REFERENCE;
    PyObject *reports = PySequence_Tuple(given[0]);
    bool fit = reports != NULL;
    for (Py_ssize_t one = 0; fit && one < PyTuple_Size(reports); one++)
        fit = (PyObject *)Py_TYPE(PyTuple_GetItem(reports, one)) == python.member_classes[REPORTS].class;
    bool done = fit;
    for (Py_ssize_t one = 0; done && one < PyTuple_Size(reports); one++) {
        PyObject *result = report_one(call->core, PyTuple_GetItem(reports, one));
        done = note_end(result, given[1]);
        Py_XDECREF(result);
    }
    Py_XDECREF(reports);
    return !fit ? REFERENCE : done ? returns_none(call) : FAILED;
}

static Verdict arrive(Call *call)
{
    PyObject *record;
    if (call->names != NULL || call->count != 1 || !is_name(call->arguments[0]) ||
        !known(call, call->arguments[0], &record))
        return REFERENCE;
    PyObject *const values[] = {call->arguments[0], python.empty_text};
    const bool is_new = record == NULL;
    Py_XDECREF(record);
    return is_new ? emitted_alone(call, KIND_RequestArrived, values, 2) : returns_none(call);
}

/* The value of the argument `aborted`; borrowed. NULL: left to Python. */
static PyObject *is_aborted(const Call *call)
{
    if (call->names == NULL)
        return Py_False;
    const bool is_one = PyTuple_Size(call->names) == 1 &&
                        same_text(PyTuple_GetItem(call->names, 0), name_of(N_aborted));
    PyObject *aborted = is_one ? call->arguments[call->count] : NULL;
    return is_one && PyBool_Check(aborted) ? aborted : NULL;
}

static Verdict finish(Call *call)
{
    int64_t word;
    PyObject *aborted = call->count == 1 ? is_aborted(call) : NULL, *record;
    if (aborted == NULL || !is_name(call->arguments[0]))
        return REFERENCE;
    PyObject *request = call->arguments[0];
    const bool lives = known(call, request, &record) &&
        record != NULL && get_number(record, N_word, &word) && state_of((int32_t)word) != REQUEST_FINISHED;
    Py_XDECREF(record);
    if (!lives)
        return REFERENCE;
    PyObject *const values[] = {request, aborted};
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

/* Flush the log. reason: a `LogFlush`. */
static bool flush_for(Call *call, PyObject *reason)
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
    if (ended == NULL || !flush_for(call, of_python.jobs_leave))
        return FAILED;
    call->result = owned(Py_None);
    return FOLDED;
}

/* Add `more` to this number of the core. */
static bool count_in_core(Call *call, Name name, int64_t more)
{
    int64_t before;
    return number_of(call, name, &before) && set_in_core(call, name, before + more);
}

/* Whether this call need not check for plans that were never submitted: that check is left to Python. */
static bool looks_later(Call *call)
{
    int64_t until_look;
    return number_of(call, N_until_look, &until_look) && until_look > 1;
}

/* Left to Python: ticks that are events, because requests are deferred or transfers count ticks. */
static Verdict tick(Call *call)
{
    int64_t ticks;
    if (call->names != NULL || call->count != 0 || !looks_later(call) || !is_empty(field(&call->look, N_deferred)) ||
        !configured(call, N_transfer_ticks, &ticks) || (ticks > 0 && !is_empty(field(&call->look, N_transfers))))
        return REFERENCE;
    return count_in_core(call, N_until_look, -1) ? returns_none(call) : FAILED;
}

/* Whether this step ends without a check of plans. emits: set to whether the step had an event; then its end is an
   event, too. */
static bool may_end_step(Call *call, bool *emits)
{
    int64_t step, last;
    PyObject *before = of_ledger(call, N_step);
    const bool fits = number_of(call, N_step, &step) && read_number(before, &last) && looks_later(call);
    Py_XDECREF(before);
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
        if (ended == NULL || !flush_for(call, of_python.step_ended))
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

#define CALL_OF(name, body)                                                                                      \
    static PyObject *py_##name(PyObject *core, PyObject *const *arguments, Py_ssize_t count, PyObject *names)    \
    {                                                                                                            \
        return called(body, of_python.name, core, arguments, count, names);                                      \
    }
#define CALL(name) CALL_OF(name, name)

CALL(emit)
CALL(flush_log)
CALL(match)
CALL(waits_for)
CALL(may_match)
CALL(pin)
CALL_OF(admit, admit_request)
CALL(release)
CALL(prepare_store)
CALL(store)
CALL_OF(advance, advance_cursors)
CALL(rewrite)
CALL(prepare_load)
CALL(report)
CALL(complete_load)
CALL(complete_store)
CALL(submit)
CALL(report_all)
CALL(arrive)
CALL(finish)
CALL(tick)
CALL(end_step)

#define METHOD(name)                                                                                             \
    {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL | METH_KEYWORDS, "As `" #name "` in Python."}

static PyMethodDef methods[] = {
    METHOD(emit),         METHOD(flush_log), METHOD(match),  METHOD(waits_for),     METHOD(may_match),
    METHOD(pin),          METHOD(admit),     METHOD(release), METHOD(prepare_store), METHOD(store),
    METHOD(advance),      METHOD(rewrite),   METHOD(prepare_load), METHOD(report),   METHOD(complete_load),
    METHOD(complete_store), METHOD(submit),  METHOD(report_all), METHOD(arrive),     METHOD(finish),
    METHOD(tick),         METHOD(end_step),  {NULL, NULL, 0, NULL},
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
   IllegalTransition, InvalidEvent, cannot_pin, NOBODY, THE_LOG, KEY_BYTES_MAX, time, JOBS_LEAVE, STEP_ENDED, REPORTS_TAKEN): take what the calls need of Python. */
PyObject *connect_core(PyObject *module, PyObject *arguments)
{
    (void)module;
    OfPython of = {0};
    /* In the order of `methods`, and of the arguments. */
    PyObject **const functions[] = {
        &of.emit,    &of.flush_log, &of.match,        &of.waits_for,     &of.may_match,     &of.pin,
        &of.admit,   &of.release,   &of.prepare_store, &of.store,        &of.advance,       &of.rewrite,
        &of.prepare_load, &of.report, &of.complete_load, &of.complete_store, &of.submit,    &of.report_all,
        &of.arrive,  &of.finish,    &of.tick,         &of.end_step};
    PyObject **const others[] = {&of.match_made,         &of.prepared_made, &of.job_made,   &of.ended_made,
                                 &of.result_made,        &of.recorded_ns,        &of.described,     &of.time_ns,    &of.native_ledger,
                                 &of.illegal_transition, &of.invalid_event, &of.cannot_pin, &of.nobody,     &of.the_log,
                                 &of.key_bytes_max, &of.time, &of.jobs_leave, &of.step_ended, &of.reports_taken};
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
