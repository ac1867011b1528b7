/* The calls of a core: what their files share.

   A call looks at everything first. If it finds something that it does not know, nothing was changed, and the
   Python function of the same name takes the whole call: so each refusal, and each text of an error, is there.
   Once the clock has been asked, there is no way back: then everything is done here. */

#ifndef KVSM_CALLS_H
#define KVSM_CALLS_H

#include "body.h"

/* What the calls have of Python. Never freed: it lives as long as the process. */
typedef struct {
    PyObject *emit, *match, *prepare_load, *report, *complete_load, *complete_store, *finish; /* the functions */
    PyObject *match_made, *job_made, *ended_made, *result_made; /* classes of what calls return */
    PyObject *counted;                                          /* the result of a report that ended nothing */
    PyObject *recorded_ns, *described, *time_ns, *native_ledger, *illegal_transition, *invalid_event;
    PyObject *nobody, *the_log; /* who may change the ledger, if no thread may */
    PyObject *one, *key_bytes_max;
} OfPython;

extern OfPython of_python;

/* A call, and what it has looked up. */
typedef struct {
    PyObject *core, *const *arguments; /* borrowed */
    Py_ssize_t count;                  /* of the arguments without a name; those with names are behind them */
    PyObject *names;                   /* of these; NULL: none has a name */
    PyObject *fields;                  /* the core's attributes; owned */
    PyObject *ledger;                  /* owned */
    PyObject *thread;                  /* the one that may change the ledger, which is this one; owned */
    bool folds;                        /* whether this body folds the ledger */
    Folding look;     /* to read the ledger by `field`. What was read may be old once an event was emitted */
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
Verdict emit(Call *call);
PyObject *emitted(Call *call, PyObject *kind, PyObject *const *fields, Py_ssize_t count);

#endif
