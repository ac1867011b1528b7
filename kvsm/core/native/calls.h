/* Common declarations of the native calls of a core.

   A call checks everything first. If a case is not implemented here, nothing has changed yet, and the Python function
   of the same name runs the whole call: so all refusals, and the texts of all errors, are only in Python. The clock
   is read once for each event; after it was read, the call can no longer be left to Python. */

#ifndef KVSM_CALLS_H
#define KVSM_CALLS_H

#include "body.h"

/* Python objects that the calls use. Never freed: they live as long as the process. */
typedef struct {
    PyObject *emit, *flush_log, *match, *waits_for, *may_match, *pin, *admit, *release, *prepare_store, *store, *advance,
        *rewrite, *prepare_load, *report, *complete_load, *complete_store, *submit, *report_all, *arrive, *finish, *tick,
        *end_step; /* the functions */
    PyObject *match_made, *prepared_made, *job_made, *ended_made, *result_made; /* classes of what calls return */
    PyObject *counted;                                          /* the result of a report that ended nothing */
    PyObject *recorded_ns, *described, *time_ns, *native_ledger, *illegal_transition, *invalid_event, *cannot_pin;
    PyObject *nobody, *the_log; /* values of `_may_change` if no thread may change the ledger */
    PyObject *one, *no_key, *key_bytes_max, *time, *jobs_leave, *step_ended, *reports_taken;
} OfPython;

extern OfPython of_python;

/* A call, and the objects that it has looked up. */
typedef struct {
    PyObject *core, *const *arguments; /* borrowed */
    Py_ssize_t count;                  /* of the positional arguments; the keyword arguments follow them */
    PyObject *names;                   /* of the keyword arguments; NULL: none */
    PyObject *fields;                  /* the core's attributes; owned */
    PyObject *ledger;                  /* owned */
    PyObject *thread;                  /* the thread that may change the ledger: the current one; owned */
    bool folds;                        /* whether this body folds the ledger */
    Folding look;     /* to read the ledger by `field`. The values may be outdated once an event was emitted */
    PyObject *result; /* owned */
} Call;

static inline PyObject *owned(PyObject *object)
{
    Py_XINCREF(object);
    return object;
}

/* emitter.c */
bool begin_call(Call *call); /* to be ended in any case; false: Python takes the call */
void end_call(Call *call);
PyObject *of_core(Call *call, Name name);   /* an attribute; owned */
PyObject *of_ledger(Call *call, Name name); /* the same */
bool configured(Call *call, Name name, int64_t *number);
bool number_of(Call *call, Name name, int64_t *number); /* of the core */
bool set_in_core(Call *call, Name name, int64_t value);
Verdict emit(Call *call);
PyObject *emitted(Call *call, PyObject *kind, PyObject *const *fields, Py_ssize_t count);
Verdict emitted_alone(Call *call, int kind, PyObject *const *fields, Py_ssize_t count);
Verdict flush_log(Call *call);

/* calls.c */

/* Numbers for an event. Large batches have their own memory. */
typedef struct {
    Batch batch; /* `object` is NULL */
    int64_t *many;
} Numbers;

bool numbers_begin(Numbers *numbers, Py_ssize_t most); /* memory for this many; false: an error is set */
void numbers_add(Numbers *numbers, int64_t number);
void numbers_end(Numbers *numbers);
bool is_name(PyObject *text);
bool known(Call *call, PyObject *request, PyObject **record); /* owned, or NULL; false: Python takes the call */
Verdict returns_none(Call *call); /* without an event */
PyObject *packed(const int64_t *ids, Py_ssize_t count);

/* matching.c */
Verdict match(Call *call);
Verdict waits_for(Call *call);
Verdict may_match(Call *call);
Verdict pin(Call *call);
Verdict admit_request(Call *call); /* `admit` */
Verdict release(Call *call);

/* storing.c */
PyObject *host_blocks(const int64_t *slots, Py_ssize_t count, int64_t chunk); /* of whole slots, packed; owned */
bool is_key(PyObject *key);
Verdict prepare_store(Call *call);
Verdict store(Call *call);
Verdict advance_cursors(Call *call); /* `advance` in Python: the C library exports a function of that name */
Verdict rewrite(Call *call);

#endif
