/* Emits events (kvsm/core/offloader/emitter.py). */

#include "calls.h"

OfPython of_python;

/* ------------------------------------------------------------------------------- what a call looks at */

static bool is_dict(PyObject *object) { return object != NULL && PyDict_CheckExact(object); }

static bool is_this_thread(PyObject *thread)
{
    if (thread == NULL || !PyLong_CheckExact(thread))
        return false;
    const unsigned long identity = PyLong_AsUnsignedLong(thread);
    if (identity == (unsigned long)-1 && PyErr_Occurred()) { /* nobody may */
        PyErr_Clear();
        return false;
    }
    return identity == PyThread_get_thread_ident();
}

/* An attribute of the core or of its ledger, whose own attributes are `fields`; owned. */
static PyObject *attribute(PyObject *owner, PyObject *fields, Name name)
{
    PyObject *value = PyDict_GetItemWithError(fields, name_of(name));
    return value != NULL ? owned(value) : attribute_of(owner, name);
}

PyObject *of_core(Call *call, Name name) { return attribute(call->core, call->fields, name); }

PyObject *of_ledger(Call *call, Name name) { return attribute(call->ledger, call->look.fields, name); }

/* Whether this thread may change the ledger, and core and ledger have the classes and attributes that C code needs. */
bool begin_call(Call *call)
{
    call->fields = PyObject_GenericGetDict(call->core, NULL);
    if (call->fields == NULL)
        return false;
    call->thread = owned(PyDict_GetItemWithError(call->fields, name_of(N__may_change)));
    call->ledger = owned(PyDict_GetItemWithError(call->fields, name_of(N_ledger)));
    if (!is_this_thread(call->thread) || call->ledger == NULL)
        return false;
    call->folds = (PyObject *)Py_TYPE(call->ledger) == of_python.native_ledger;
    call->look.fold = (Fold *)call->ledger;
    if (call->folds && call->look.fold->folds)
        return false;
    call->look.fields = PyObject_GenericGetDict(call->ledger, NULL);
    return call->look.fields != NULL && is_dict(field(&call->look, N_requests)) &&
           is_dict(field(&call->look, N_transfers));
}

void end_call(Call *call)
{
    fold_end(&call->look);
    Py_XDECREF(call->fields);
    Py_XDECREF(call->ledger);
    Py_XDECREF(call->thread);
}

/* A number of the configuration. */
bool configured(Call *call, Name name, int64_t *number)
{
    return get_number(PyDict_GetItemWithError(call->fields, name_of(N_config)), name, number);
}

/* ------------------------------------------------------------------------------------ emitter.py: emit */

/* Ask the clock, once. */
static PyObject *recorded_now(Call *call)
{
    PyObject *clock = of_core(call, N__clock_ns), *recorded;
    PyObject *now = clock == NULL ? NULL : PyObject_CallFunctionObjArgs(clock, NULL);
    const bool is_known = clock == of_python.time_ns;
    int64_t number;
    if (!is_known) /* it may have changed anything */
        forget_seen(&call->look);
    Py_XDECREF(clock);
    if (now == NULL)
        return NULL;
    /* What fits in 64 bits is compared with 0 much faster than it is read. */
    if (is_known ? PyObject_RichCompareBool(now, python.zero, Py_GE) > 0 : read_number(now, &number))
        return now;
    recorded = PyObject_CallFunctionObjArgs(of_python.recorded_ns, now, NULL);
    Py_DECREF(now);
    return recorded;
}

static PyObject *next_seq(Call *call)
{
    PyObject *seq = of_ledger(call, N_seq), *next = seq == NULL ? NULL : PyNumber_Add(seq, of_python.one);
    Py_XDECREF(seq);
    return next;
}

/* The field values of the next event: its number, the step, the time, and these fields; owned. */
static PyObject *next_values(Call *call, PyObject *const *fields, Py_ssize_t count)
{
    PyObject *now = recorded_now(call);
    PyObject *seq = now == NULL ? NULL : next_seq(call), *step = seq == NULL ? NULL : of_core(call, N_step);
    PyObject *values = step == NULL ? NULL : PyTuple_New(3 + count);
    if (values == NULL) {
        Py_XDECREF(now);
        Py_XDECREF(seq);
        Py_XDECREF(step);
        return NULL;
    }
    PyTuple_SetItem(values, 0, seq);
    PyTuple_SetItem(values, 1, step);
    PyTuple_SetItem(values, 2, now);
    for (Py_ssize_t one = 0; one < count; one++)
        PyTuple_SetItem(values, 3 + one, owned(fields[one]));
    return values;
}

static bool may_change(Call *call, PyObject *who)
{
    return PyDict_SetItem(call->fields, name_of(N__may_change), who) == 0;
}

/* Append the event to the log, which may read the ledger meanwhile. */
static bool log_event(Call *call, PyObject *event)
{
    PyObject *log = of_core(call, N_log), *done = NULL;
    if (log == NULL || log == Py_None) {
        Py_XDECREF(log);
        return log != NULL;
    }
    if (may_change(call, of_python.the_log))
        done = PyObject_CallMethodObjArgs(log, name_of(N_append), event, NULL);
    Py_DECREF(log);
    Py_XDECREF(done);
    return done != NULL;
}

/* Handle the failure of an event, or of a flush. A refused event has changed nothing. Any other failure, an interrupt
   included, stops the core: the log would lack an event that the ledger may have folded. */
static void after_failure(Call *call, bool may_be_refused)
{
    PyObject *kind, *error, *trace;
    bool done;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (may_be_refused && (PyErr_GivenExceptionMatches(error, of_python.illegal_transition) ||
                           PyErr_GivenExceptionMatches(error, of_python.invalid_event))) {
        done = may_change(call, call->thread);
    } else {
        PyObject *text = PyObject_CallFunctionObjArgs(of_python.described, error, NULL), *stopped = NULL;
        if (text != NULL)
            stopped = PyObject_CallMethodObjArgs(call->core, name_of(N__stop), text, NULL);
        done = stopped != NULL;
        Py_XDECREF(text);
        Py_XDECREF(stopped);
    }
    if (done) {
        PyErr_Restore(kind, error, trace);
        return;
    }
    Py_XDECREF(kind); /* another error takes its place, such as an interrupt, and nobody may change the ledger */
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* `emit`, in the thread that may change the ledger. Returns the transfer that the event ended, or None; owned. */
PyObject *emitted(Call *call, PyObject *kind, PyObject *const *fields, Py_ssize_t count)
{
    PyObject *values = next_values(call, fields, count), *ended = NULL;
    PyObject *event = values == NULL ? NULL : PyObject_Call(kind, values, NULL);
    if (event != NULL && may_change(call, of_python.nobody)) {
        call->look.values = values;
        ended = call->folds ? fold_next(&call->look, event)
                            : PyObject_CallMethodObjArgs(call->ledger, name_of(N_apply), event, NULL);
        if (ended == NULL || !log_event(call, event)) {
            Py_CLEAR(ended);
            after_failure(call, true);
        } else if (!may_change(call, call->thread))
            Py_CLEAR(ended);
    }
    Py_XDECREF(event);
    Py_XDECREF(values);
    return ended;
}

static bool is_kind(PyObject *kind)
{
    for (int one = 0; one < NUM_KINDS; one++)
        if (kind == python.kinds[one])
            return true;
    return false;
}

Verdict emit(Call *call)
{
    if (call->names != NULL || call->count < 1 || !is_kind(call->arguments[0]))
        return REFERENCE;
    call->result = emitted(call, call->arguments[0], call->arguments + 1, call->count - 1);
    return call->result == NULL ? FAILED : FOLDED;
}

/* Emit an event that ends no transfer, for a call that returns None. */
Verdict emitted_alone(Call *call, int kind, PyObject *const *fields, Py_ssize_t count)
{
    PyObject *ended = emitted(call, python.kinds[kind], fields, count);
    Py_XDECREF(ended);
    return ended == NULL ? FAILED : returns_none(call);
}

/* ------------------------------------------------------------------------------- emitter.py: flush_log */

bool number_of(Call *call, Name name, int64_t *number)
{
    PyObject *value = of_core(call, name);
    const bool read = read_number(value, number);
    Py_XDECREF(value);
    return read;
}

/* Whether a flush with this reason can wait for a later step. next: set to the latest time of the next flush (ns), if
   this flush sets one; else 0. */
static Verdict may_wait(Call *call, int64_t seq, bool *waits, int64_t *next)
{
    PyObject *reason = call->arguments[0];
    const bool is_step = reason == of_python.step_ended, can = is_step || reason == of_python.reports_taken;
    const bool has_transfers = !is_empty(field(&call->look, N_transfers));
    int64_t before, within, by, now;
    if (!number_of(call, N__flushed_seq, &before) || !number_of(call, N__flush_within_ns, &within) ||
        !number_of(call, N__flush_by_ns, &by))
        return REFERENCE;
    *waits = has_transfers && can && (!is_step || before == seq - 1);
    *next = 0;
    if (*waits || within == 0)
        return FOLDED;
    PyObject *time = PyObject_CallMethodObjArgs(of_python.time, name_of(N_monotonic_ns), NULL);
    const bool is_time = read_number(time, &now) && now <= INT64_MAX - within;
    Py_XDECREF(time);
    if (!is_time)
        return REFERENCE;
    /* More time than the whole interval is left only if the clock has gone back. */
    const bool is_early = by > now && by - now <= within;
    *waits = can && is_early && (has_transfers || !is_empty(field(&call->look, N_requests)));
    *next = now + within;
    return FOLDED;
}

bool set_in_core(Call *call, Name name, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    const bool done = number != NULL && PyDict_SetItem(call->fields, name_of(name), number) == 0;
    Py_XDECREF(number);
    return done;
}

/* Flush the log, which may read the ledger meanwhile. */
static bool flush(Call *call, PyObject *log)
{
    PyObject *done = NULL;
    if (!may_change(call, of_python.the_log))
        return false;
    done = PyObject_CallMethodObjArgs(log, name_of(N_flush), NULL);
    Py_XDECREF(done);
    if (done == NULL)
        after_failure(call, false);
    return done != NULL && may_change(call, call->thread);
}

/* Record the flush, then flush the log. */
static bool flushed(Call *call, PyObject *last, int64_t next)
{
    if ((next > 0 && !set_in_core(call, N__flush_by_ns, next)) ||
        PyDict_SetItem(call->fields, name_of(N__flushed_seq), last) < 0)
        return false;
    PyObject *log = of_core(call, N_log);
    const bool done = log != NULL && (log == Py_None || flush(call, log));
    Py_XDECREF(log);
    return done;
}

Verdict flush_log(Call *call)
{
    int64_t seq, next;
    bool waits;
    PyObject *last = of_ledger(call, N_seq);
    Verdict verdict = REFERENCE;
    if (call->names == NULL && call->count == 1 && read_number(last, &seq))
        verdict = may_wait(call, seq, &waits, &next);
    if (verdict == FOLDED && !waits && !flushed(call, last, next))
        verdict = FAILED;
    Py_XDECREF(last);
    return verdict == FOLDED ? returns_none(call) : verdict;
}
