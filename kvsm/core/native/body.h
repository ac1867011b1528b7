/* Common declarations of the native body of the fold.

   The state is the Python state (kvsm/core/ledger/state.py): the same arrays, dicts and records. The C functions
   change it as the Python handlers do, file by file and function by function under the same names. They fold the
   common cases. All other cases, and all refusals, they leave to the Python handler before anything is changed:
   so rare rules and error texts exist only once, in Python. */

#ifndef KVSM_BODY_H
#define KVSM_BODY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tables.h"

/* The result of folding an event, or of a part of it. */
typedef enum {
    FOLDED,
    REFERENCE, /* nothing was changed: the Python handler folds the event, or refuses it */
    FAILED     /* a Python error is set, and the state may be half changed: out of memory */
} Verdict;

/* ------------------------------------------------------------------------------------------- words.c */

extern unsigned char arcs_taken[NUM_MACHINES][MOST_ARCS];

int32_t machine_step(const Machine *machine, int trigger, int32_t word); /* -1: no row matches */

static inline int state_of(int32_t word) { return word & STATE_MASK; }

/* The state words of all things of one machine, such as blocks: memory of a Python array. */
typedef struct {
    const Machine *machine;
    PyObject *owner; /* the StateWords whose memory this is */
    Py_buffer buffer, totals_buffer;
    int32_t *words;
    int64_t *totals; /* for each state, the number of things in it; then, for each counter, of things where it is > 0 */
    int32_t size;
} Words;

void count_words(const Words *words, int32_t word, int64_t more); /* add `more` things with this word */

/* --------------------------------------------------------------------------------------------- ids.c */

/* A batch of ids: a tuple of up to SMALL, or a numpy array of int64. */
typedef struct {
    PyObject *object; /* in the ledger's form; owned */
    Py_ssize_t count;
    const int64_t *ids;
    int64_t small[SMALL];
    Py_buffer buffer;
} Batch;

bool batch_of(Batch *batch, PyObject *ids);   /* packed or not; false: of a form that this body does not read */
bool batch_read(Batch *batch, PyObject *ids); /* the same; if false, an error may be set */
PyObject *refuse_slots(void);                 /* after `batch_read` was false; returns NULL with an error set */
void batch_clear(Batch *batch);
PyObject *array_object(const int64_t *ids, Py_ssize_t count);
PyObject *ids_object(const int64_t *ids, Py_ssize_t count); /* in the ledger's form */
PyObject *unpacked(PyObject *packed);      /* as bytes of int64. NULL without an error: `pack` makes no such bytes */
bool is_aligned(const Py_buffer *buffer);  /* whether each item is aligned, so that it can be read in place */
bool is_int64(const Py_buffer *buffer);    /* the same for int64; the buffer needs a format */
bool read_number(PyObject *number, int64_t *value);         /* false: not an int from 0 to 2**63 - 1 */
PyObject *packed_ids(const int64_t *ids, Py_ssize_t count); /* of many ids. None: one of them is no id */
PyObject *pack_ids(PyObject *module, PyObject *ids);        /* None: Python packs, or refuses */
PyObject *unpack_ids(PyObject *module, PyObject *packed);   /* None: `pack` makes no such bytes */

/* -------------------------------------------------------------------------------------- copy_plans.c */

PyObject *plan_runs(PyObject *module, PyObject *arguments); /* None: Python merges, or refuses */
PyObject *plan_rectangles(PyObject *module, PyObject *arguments);
PyObject *plan_fragments(PyObject *module, PyObject *arguments);

/* ----------------------------------------------------------------------------------------- msgpack.c */

/* A writer of bytes in pieces. */
typedef struct {
    PyObject *full;  /* the full pieces */
    PyObject *piece; /* the current piece */
    char *memory;    /* of the current piece */
    Py_ssize_t used; /* bytes written to the current piece */
    int64_t items;   /* number of items written; the caller counts them */
} Stream;

bool stream_write(Stream *stream, const void *data, Py_ssize_t size);
bool stream_object(Stream *stream, PyObject *object);
bool stream_pair(Stream *stream, PyObject *first, PyObject *second);
PyObject *stream_taken(Stream *stream);
void stream_clear(Stream *stream);

/* -------------------------------------------------------------------------------------- slot_queue.c */

typedef struct FrozenPart FrozenPart;

#define GROUP 64 /* slots whose bits are one number */

typedef struct {
    PyObject_HEAD
    uint64_t *row, *listed; /* a bit for each slot: whether it is in the row, and whether in the list behind it */
    int32_t *next, *before; /* the list, by slot + 1; 0 is the end of both directions. Only for `listed` slots */
    int64_t size;
    int32_t capacity, groups, row_from; /* the groups before row_from have no slot in the row */
    PyObject *links;    /* owns the memory of `next` */
    FrozenPart *frozen; /* the copy of the order in progress; owned. NULL: none */
} SlotQueue;

void queue_append(SlotQueue *queue, int32_t slot);
int32_t queue_place(SlotQueue *queue, int64_t slot); /* for `queue_insert`; 0, the tail: not in the queue */
void queue_insert(SlotQueue *queue, int32_t slot, int32_t place); /* before `place`, the place of another slot */
int64_t queue_first(const SlotQueue *queue);                      /* -1: it is empty */
int32_t queue_behind(const SlotQueue *queue, int32_t slot);       /* behind -1: the first. -1: there is none */
void queue_remove(SlotQueue *queue, int32_t slot);
void queue_clear(SlotQueue *queue);
void queue_fill_row(SlotQueue *queue, int32_t group, uint64_t members); /* of a group without slots in the row */

/* --------------------------------------------------------------------------------------- key_index.c */

typedef struct {
    uint32_t slot, part; /* slot + 1, or 0 if the place is free; a part of the key's hash */
} Place;

typedef struct {
    PyObject_HEAD
    PyObject *key_of; /* the list of the slots' keys */
    Place *places;    /* only through `at`, in key_index.c */
    uint64_t *clean;  /* by page: how often the index had been cleared when the page was last emptied */
    uint64_t clears;  /* how often the index was cleared */
    int64_t capacity; /* slots from 0 to this, exclusive */
    uint32_t mask;
    int64_t size;
} KeyIndex;

/* Keys are compared as bytes, so a search runs no Python code. An object of another type is never found. */
int64_t index_find(const KeyIndex *index, PyObject *key); /* -1: it is not there; -2: an error is set */
Verdict index_enter(KeyIndex *index, PyObject *keys, const Batch *slots);
int index_remove(KeyIndex *index, PyObject *key);
void index_clear(KeyIndex *index);
void index_prefetch(const KeyIndex *index, PyObject *keys, Py_ssize_t count);

/* ------------------------------------------------------------------------------------------ ledger.c */

/* The C part of a ledger: where the memory of its arrays is, and scratch memory. */
typedef struct {
    PyObject_HEAD
    Words blocks, leases;
    PyObject *generation_owner;
    Py_buffer generation_buffer;
    int64_t *generation; /* of the slots before generation_size */
    Py_ssize_t generation_size;
    int32_t *mark; /* for each id, the last batch that it was in: finds duplicates in a batch */
    int32_t mark_size, marked;
    int32_t *scratch; /* new words of a batch */
    Py_ssize_t scratch_size;
    bool folds; /* an event is being folded: its words are in `scratch` */
    PyObject *frozen; /* the parts of the state that are being copied, a tuple; NULL: no copy is in progress */
} Fold;

/* Names of attributes, interned. */
#define NAMES(X)                                                                                                 \
    X(seq) X(step) X(tick) X(epoch) X(voided_at) X(ended_at) X(forgotten_at) X(blocks) X(leases) X(generation)    \
    X(key_of) X(index) X(free) X(policy) X(copied_out) X(transfers) X(planned_word) X(requests) X(deferred)       \
    X(provenance) X(offers) X(listener) X(config) X(_queue) X(words) X(brought) X(stale) X(times) X(workers)      \
    X(blocks_per_chunk) X(request) X(target) X(slots) X(transfer) X(until) X(moved) X(owners) X(keys)             \
    X(device_blocks) X(source) X(voided) X(parts) X(worker) X(good) X(id) X(direction) X(word) X(since)           \
    X(reported) X(flush) X(name) X(pins) X(pinned_at) X(awaits) X(patience) X(load) X(settled) X(offered)         \
    X(weights) X(age) X(cleared) X(clear) X(busy) X(idle) X(touched) X(admitted)                                  \
    X(rewritten) X(forget) X(stored) X(removed) X(__dict__) X(ledger) X(log) X(publisher) X(_clock_ns)      \
    X(parents) X(last_keys) X(_may_change) X(_stop) X(totals) X(apply) X(append) X(ended) X(aborted)              \
    X(max_live_transfers) X(kept) X(using) X(evicting)              \
    X(flush_log) X(until_look) X(host_blocks) X(transfer_ticks) X(_flush_within_ns) X(_flush_by_ns)              \
    X(_flushed_seq) X(monotonic_ns) X(error) X(queued_us) X(copied_us) X(report)

/* Names that only offers need. */
#define NAMES_OF_OFFERS(X)                                                                                            \
    X(tables) X(remote_decode) X(trusted) X(loaded) X(next_offer) X(refused) X(max_store_tokens) X(prompt_only)       \
    X(_layout) X(num_computed_tokens) X(num_output_placeholders) X(num_prompt_tokens) X(num_tokens) X(block_hashes)   \
    X(_stores_early) X(_offloader) X(_config) X(_has_threshold) X(_blocks_per_chunk) X(_runs) X(_starts) X(_begun)    \
    X(_parents) X(_reached) X(_offered_before) X(groups) X(kind) X(drafter) X(block_tokens) X(due) X(collect_due)     \
    X(collect) X(update)

typedef enum {
#define X(name) N_##name,
    NAMES(X)
    NUM_NAMES,
    LAST_NAME = NUM_NAMES - 1, /* the names of offers follow it */
    NAMES_OF_OFFERS(X)
#undef X
        NUM_ALL_NAMES
} Name;

#define MOST_FIELDS 16 /* most fields of an event that are read from its tuple of values */

/* A class whose instances keep their fields in members, and the descriptors of those: they read and write a field
   several times faster than a look-up by its name. */
typedef struct {
    PyObject *class, *members[NUM_ALL_NAMES]; /* NULL: no field of this name */
} MemberClass;

enum { REQUESTS, TRANSFERS, CONFIGS, REPORTS, TRACKED, NUM_MEMBER_CLASSES };

/* Python objects that the module uses. Never freed: they live as long as the process. */
typedef struct {
    MemberClass member_classes[NUM_MEMBER_CLASSES];
    descrgetfunc get_member;
    descrsetfunc set_member;
    PyObject *names[NUM_ALL_NAMES];
    PyObject *array_of, *lru, *admit_runs, *transfer_record, *request_record, *store, *load, *encode;
    PyObject *no_ids, *empty_text, *zero, *minus_one;
    PyObject *kinds[NUM_KINDS];
    Name fields[NUM_KINDS][MOST_FIELDS]; /* the fields of each kind. NUM_NAMES: none, or a field not read in C */
    PyObject *reference; /* Ledger.apply in Python */
    PyTypeObject *fold, *slot_queue, *key_index, *frozen_part;
} Python;

extern Python python;

PyObject *take(const char *module_name, const char *name); /* a member of a Python module; owned */
bool take_members(int place, const char *module, const char *class); /* the descriptors of the fields of a class */

static inline PyObject *name_of(Name name) { return python.names[name]; }

/* The state of folding a sequence of events. */
typedef struct {
    Fold *fold;
    PyObject *fields;          /* the ledger's attributes */
    PyObject *seen[NUM_NAMES]; /* the attributes read so far; owned, because a policy or a listener may replace them */
    Name read[NUM_NAMES];      /* the names of those */
    int num_read;
    PyObject *event;
    int kind;         /* -1: unknown */
    PyObject *values; /* the event's field values, a tuple; borrowed. NULL: read its attributes instead */
    PyObject *seq_object;
    int64_t seq;
    PyObject *ended; /* the transfer that the event has ended; owned */
} Folding;

/* An attribute of the ledger; borrowed from `folding`. NULL without an error: there is none. */
static inline PyObject *field(Folding *folding, Name name)
{
    PyObject **seen = &folding->seen[name];
    if (*seen == NULL && (*seen = PyDict_GetItemWithError(folding->fields, name_of(name))) != NULL) {
        Py_INCREF(*seen);
        folding->read[folding->num_read++] = name;
    }
    return *seen;
}

void forget_seen(Folding *folding); /* before code that may replace attributes of the ledger */
PyObject *attribute_of(PyObject *owner, Name name); /* owned. NULL: an error is set. `owner` may be NULL */

bool set_attribute(PyObject *owner, Name name, PyObject *value);
bool set_field(Folding *folding, Name name, PyObject *value);
bool get_number(PyObject *owner, Name name, int64_t *value);
bool set_number(PyObject *owner, Name name, int64_t value);
bool field_number(Folding *folding, Name name, int64_t *value);
bool is_empty(PyObject *container); /* of a dict or a tuple; true also for NULL */
bool same_text(PyObject *text, PyObject *other);

/* New words of a batch, in the fold's scratch memory, or NULL: no row matches, or an id does not exist. */
int32_t *next_words(Folding *folding, const Words *words, const Machine *machine, int trigger, const Batch *ids);
bool are_distinct(Folding *folding, const Batch *ids, int32_t size);
int32_t begin_marks(Folding *folding, int32_t size); /* a new mark for ids below `size`, in `mark`; 0: no memory */
void commit(const Words *words, const Batch *ids, const int32_t *new_words);

/* ------------------------------------------------------------------------------- the fold, as in Python */

/* index.c */
Verdict enter(Folding *folding, PyObject *keys, const Batch *slots);
PyObject *remove_keys(Folding *folding, const Batch *slots); /* the keys, as a tuple; NULL: FAILED */
KeyIndex *index_of(Folding *folding);                        /* borrowed; NULL: it is another one */

/* order.c */
bool may_reorder(Folding *folding, PyObject *request);
Verdict leave_order(Folding *folding, const Batch *slots, const int32_t *pinned);
Verdict come_back(Folding *folding, const Batch *slots, const int32_t *released, Py_ssize_t *idle);
Verdict touch(Folding *folding, const Batch *slots, const int32_t *words);
Verdict admit(Folding *folding, const Batch *slots, PyObject *keys, PyObject *parents, int64_t planned_at);
bool parents_fit(Folding *folding, PyObject *parents, Py_ssize_t count);
SlotQueue *lru_queue(PyObject *policy); /* borrowed; NULL: another policy */
SlotQueue *free_queue(Folding *folding);

/* requests.c */
Verdict request_arrived(Folding *);
Verdict request_preempted(Folding *);
Verdict request_finished(Folding *);
Verdict hit_matched(Folding *);
Verdict request_admitted(Folding *);
Verdict hit_released(Folding *);
Verdict request_deferred(Folding *);
Verdict ticked(Folding *);
PyObject *named(Folding *folding, PyObject *name); /* borrowed; NULL: REFERENCE */
bool live_pins(Folding *folding, PyObject *request, Batch *pins);
Verdict unpin(Folding *folding, PyObject *request, const Batch *slots, int32_t *new_words);
Verdict settle(Folding *folding, PyObject *request, int32_t word);
Verdict wake_waiting(Folding *folding, int64_t transfer);

/* stores.c */
Verdict blocks_offered(Folding *);
Verdict blocks_evicted(Folding *);
Verdict store_planned(Folding *);

/* loads.c */
Verdict load_planned(Folding *);

/* transfers.c */
Verdict transfers_submitted(Folding *);
Verdict transfer_cancelled(Folding *);
Verdict worker_reported(Folding *);
Verdict flush_requested(Folding *);
Verdict plan(Folding *folding, PyObject *direction, PyObject *owners, const Batch *slots, const Batch *device_blocks,
             PyObject *keys, PyObject *parents); /* parents: NULL for a load */
bool pairs_fit(Folding *folding, const Batch *slots, const Batch *device_blocks);

/* cache.c */
Verdict blocks_touched(Folding *);
Verdict cache_reset(Folding *);

/* ledger.c */
Verdict only_recorded(Folding *);
Verdict store_skipped(Folding *);
bool is_ledger_class(PyObject *class); /* whether its instances begin with a `Fold`. false: an error is set */
PyObject *fold_next(Folding *folding, PyObject *event); /* as `Ledger.apply` in Python */
void fold_end(Folding *folding);
bool slots_of(Batch *batch, PyObject *slots); /* in the ledger's form, of int64 if they are an array. false: an error may be set */
bool see_state(Folding *folding); /* whether the words, the index, requests and transfers can be looked at */
PyObject *value_of(Folding *folding, Name name); /* of a field of the event; owned. NULL: it has none */

/* --------------------------------------------------------------------------------- frozen.c, keeping.c */

PyObject *freeze(Folding *folding);                /* the parts; owned. NULL without an error: it cannot */
PyObject *freeze_queue(SlotQueue *queue);          /* a part; owned. The copy before it is dropped */
void keep_for_event(Folding *folding, int kind);   /* before anything is changed */
void keep_link(SlotQueue *queue, int32_t node);    /* before `next` of this node is changed */

#endif
