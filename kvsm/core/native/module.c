/* The module `kvsm.core.native._body`: its types, and what they have of Python. */

#include "body.h"

#ifndef SOURCES_DIGEST
#error "define SOURCES_DIGEST as setup.py does: kvsm loads no body that does not name its sources"
#endif

extern PyType_Spec fold_spec, slot_queue_spec, key_index_spec, frozen_part_spec, packer_spec, core_spec;
extern PyObject *connect_core(PyObject *module, PyObject *arguments);    /* calls.c */
extern PyObject *connect_offers(PyObject *module, PyObject *arguments);  /* offers.c */
extern PyObject *find_due(PyObject *module, PyObject *arguments);
extern PyObject *collect_due(PyObject *module, PyObject *arguments);

Python python;

static const char *const names[NUM_ALL_NAMES] = {
#define X(name) [N_##name] = #name,
    NAMES(X) NAMES_OF_OFFERS(X)
#undef X
};

PyObject *take(const char *module_name, const char *name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    if (module == NULL)
        return NULL;
    PyObject *member = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    return member;
}

static bool take_reference(void)
{
    PyObject *ledger = take("kvsm.core.ledger.ledger", "Ledger");
    python.reference = ledger == NULL ? NULL : PyObject_GetAttrString(ledger, "apply");
    Py_XDECREF(ledger);
    return python.reference != NULL;
}

/* The fields of a kind of event, in their order. */
static bool take_fields(PyObject *kind, Name *fields)
{
    PyObject *all = PyObject_GetAttrString(kind, "__struct_fields__");
    const Py_ssize_t count = all == NULL ? -1 : PyTuple_Size(all);
    for (Py_ssize_t one = 0; one < MOST_FIELDS; one++) {
        fields[one] = NUM_NAMES;
        for (Name name = 0; one < count && name < NUM_NAMES; name++)
            if (PyUnicode_Compare(PyTuple_GetItem(all, one), name_of(name)) == 0)
                fields[one] = name;
    }
    Py_XDECREF(all);
    return count >= 0;
}

static bool take_kinds(void)
{
    PyObject *kinds = take("kvsm.events", "KINDS");
    bool taken = kinds != NULL && PyTuple_Check(kinds) && PyTuple_Size(kinds) == NUM_KINDS;
    for (Py_ssize_t kind = 0; taken && kind < NUM_KINDS; kind++) {
        python.kinds[kind] = PyTuple_GetItem(kinds, kind);
        Py_INCREF(python.kinds[kind]);
        taken = take_fields(python.kinds[kind], python.fields[kind]);
    }
    if (kinds != NULL && !taken && !PyErr_Occurred())
        PyErr_SetString(PyExc_ImportError, "the native body was built for other kinds of events");
    Py_XDECREF(kinds);
    return taken;
}

/* Take the constants that a body needs before it is connected. */
static bool take_constants(void)
{
    return (python.array_of = take("kvsm.ids", "array_of")) != NULL &&
           (python.encode = take("msgspec.msgpack", "encode")) != NULL &&
           (python.no_ids = PyTuple_New(0)) != NULL && (python.empty_text = PyUnicode_FromString("")) != NULL &&
           (python.zero = PyLong_FromLong(0)) != NULL && (python.minus_one = PyLong_FromLong(-1)) != NULL;
}

static bool take_names(void)
{
    for (int name = 0; name < NUM_ALL_NAMES; name++)
        if ((python.names[name] = PyUnicode_InternFromString(names[name])) == NULL)
            return false;
    return true;
}

bool take_members(int place, const char *module, const char *class)
{
    MemberClass *members = &python.member_classes[place];
    PyObject *taken = take(module, class);
    for (int name = 0; taken != NULL && name < NUM_ALL_NAMES; name++) {
        PyObject *member = PyObject_GetAttr(taken, name_of(name));
        PyErr_Clear(); /* it has no such field */
        if (member != NULL && Py_IS_TYPE(member, &PyMemberDescr_Type))
            members->members[name] = member;
        else
            Py_XDECREF(member);
    }
    python.get_member = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    python.set_member = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    members->class = taken;
    return taken != NULL;
}

/* connect(): take what the fold needs of Python. Later than the import, because kvsm.core.ledger imports this module. */
static PyObject *connect(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    const bool taken = take_kinds() && take_reference() && (python.lru = take("kvsm.core.policies.lru", "LRUPolicy")) != NULL &&
                       (python.transfer_record = take("kvsm.core.ledger.records", "TransferRecord")) != NULL &&
                       (python.request_record = take("kvsm.core.ledger.records", "RequestRecord")) != NULL &&
                       take_members(REQUESTS, "kvsm.core.ledger.records", "RequestRecord") &&
                       take_members(TRANSFERS, "kvsm.core.ledger.records", "TransferRecord") &&
                       take_members(CONFIGS, "kvsm.events", "OffloadConfig") &&
                       take_members(REPORTS, "kvsm.core.plan", "WorkerReport") &&
                       (python.admit_runs = take("kvsm.core.ledger.order", "admit")) != NULL &&
                       (python.store = take("kvsm.events", "STORE")) != NULL &&
                       (python.load = take("kvsm.events", "LOAD")) != NULL;
    if (!taken)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *taken(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyBytes_FromStringAndSize((const char *)arcs_taken, sizeof arcs_taken);
}

static PyObject *forget(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    memset(arcs_taken, 0, sizeof arcs_taken);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"connect", connect, METH_NOARGS, "Take what the fold needs of kvsm's Python."},
    {"connect_core", connect_core, METH_VARARGS, "Take what the calls of a core need of kvsm's Python."},
    {"connect_offers", connect_offers, METH_VARARGS, "Take what a scheduler's offers need of kvsm's Python."},
    {"find_due", find_due, METH_VARARGS,
     "The scheduled requests that may have a chunk to offer, by name; None: left to Python."},
    {"collect_due", collect_due, METH_VARARGS, "Add the chunks of these requests to a batch."},
    {"taken", taken, METH_NOARGS,
     "A byte for each arc of each machine, in the order of the tables: 1 if it was taken since `forget`.\n"
     "Each machine has as many bytes as the one with most arcs."},
    {"forget", forget, METH_NOARGS, "Make `taken` start from nothing."},
    {"pack_ids", pack_ids, METH_O, "The bytes of kvsm.ids.pack, for many ids; None: Python packs them, or refuses."},
    {"unpack_ids", unpack_ids, METH_O, "The memory of the ids, as int64; None: kvsm.ids.pack makes no such bytes."},
    {"plan_runs", plan_runs, METH_VARARGS,
     "The runs of a copy, and the number of its rectangles; None: Python merges, or refuses."},
    {"plan_rectangles", plan_rectangles, METH_VARARGS, "The columns of kvsm.copies.geometry.Rectangles, uint64."},
    {"plan_fragments", plan_fragments, METH_VARARGS, "The columns of kvsm.copies.geometry.Fragments, uint64."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kvsm.core.native._body", .m_doc = "The native body of the fold.", .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__body(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *fold = PyType_FromSpec(&fold_spec), *queue = PyType_FromSpec(&slot_queue_spec);
    PyObject *index = PyType_FromSpec(&key_index_spec), *part = PyType_FromSpec(&frozen_part_spec);
    PyObject *packer = PyType_FromSpec(&packer_spec), *core = PyType_FromSpec(&core_spec);
    python.fold = (PyTypeObject *)fold;
    python.slot_queue = (PyTypeObject *)queue;
    python.key_index = (PyTypeObject *)index;
    python.frozen_part = (PyTypeObject *)part;
    Py_XINCREF(queue);
    Py_XINCREF(index);
    if (fold == NULL || queue == NULL || index == NULL || part == NULL || packer == NULL ||
        core == NULL || !take_constants() || !take_names() ||
        PyModule_AddStringConstant(module, "SOURCES", SOURCES_DIGEST) < 0 ||
        PyModule_AddStringConstant(module, "MACHINES", MACHINES_DIGEST) < 0 ||
        PyModule_AddStringConstant(module, "KINDS", KIND_NAMES) < 0 ||
        PyModule_AddIntConstant(module, "SMALL", SMALL) < 0 || PyModule_AddObject(module, "FoldBody", fold) < 0 ||
        PyModule_AddObject(module, "QueueBody", queue) < 0 || PyModule_AddObject(module, "IndexBody", index) < 0 ||
        PyModule_AddObject(module, "PackerBody", packer) < 0 ||
        PyModule_AddObject(module, "CoreBody", core) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
