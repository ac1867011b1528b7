/* The native part of a witness: what book.c and witness.c share.

   The second book (kvsm/explain/verify/book.py) is one of lists, dicts and sets of Python. This part changes them as the
   book does, for events that are common and break nothing. All others it leaves to the book, before anything is
   changed. So the text of each violation is there alone. It reads no table of kvsm/states/. */

#ifndef KVSM_WITNESS_H
#define KVSM_WITNESS_H

#include "body.h"

/* Ids of slots or device blocks: memory that is used again for each event. */
typedef struct {
    int64_t *ids;
    Py_ssize_t count, room;
} Ids;

/* The attributes of a book. What a log tells may be any number, and stays one of Python. */
typedef struct {
    PyObject_HEAD
    PyObject *slots, *leases, *keys, *held, *transfers, *matches, *loads, *waits, *spoiled, *brought, *older, *cursors, *may_go_back,
        *offers, *tick, *last_void, *last_end, *last_loss;
    long long free, idle, chunk, workers;
    Ids now_slots, now_blocks; /* what the event that was followed last touches */
    Ids named;                 /* what it names, where that is less */
    bool is_followed;          /* events are being followed: its attributes stay as they are */
} Book;

/* An event that a book follows. */
typedef struct {
    Book *book;
    PyObject *event, *seq_object;
    int64_t seq;
    int kind;
    PyObject *transfer; /* the number of the transfer that it changes; owned, or NULL */
    bool brings;        /* whether it changes the content of the device blocks that it touches */
    PyObject *offers;   /* the offers whose cursors it changes; owned, or NULL */
    PyObject *name;     /* the request whose match, load or wait it changes; owned, or NULL */
    bool restarts;      /* whether it changes the cursors of this request, too */
    PyObject *keys;     /* the keys that begin or end to be held, a tuple or a list; owned, or NULL */
    PyObject *told;     /* a list: what a router must hear of this event and those before it */
    PyObject *published; /* a list: what the ledger has published of them */
} Following;

/* The entries that most slots and device blocks have: kvsm.explain.verify.book.USUAL. */
typedef enum { FREE_ENTRY, GONE, IDLE_ENTRY, PLANNED, FILLING, PINNED, READ, NUM_SLOT_ENTRIES } SlotEntry;
typedef enum { UNLEASED, READ_ONCE, WRITTEN, NUM_LEASE_ENTRIES } LeaseEntry;

/* What it has of Python. Never freed: it lives as long as the process. */
typedef struct {
    PyObject *slot_entries[NUM_SLOT_ENTRIES], *lease_entries[NUM_LEASE_ENTRIES];
    int32_t slot_words[NUM_SLOT_ENTRIES], lease_words[NUM_LEASE_ENTRIES]; /* the ledger's words that mean the same */
    PyObject *slot_reading, *lease_reading;                               /* word -> entry, for all words */
    PyObject *booked_transfer, *ledger, *array;
} BookNames;

extern BookNames books;

/* ----------------------------------------------------------------------------------------- entries.c */

static inline PyObject *slot_entry(SlotEntry entry) { return books.slot_entries[entry]; }
static inline PyObject *lease_entry(LeaseEntry entry) { return books.lease_entries[entry]; }

/* None if the list was made shorter; borrowed. */
static inline PyObject *at(PyObject *list, int64_t place)
{
    PyObject *entry = PyList_GetItem(list, (Py_ssize_t)place);
    if (entry != NULL)
        return entry;
    PyErr_Clear();
    return Py_None;
}

static inline void put(PyObject *list, int64_t place, PyObject *value)
{
    Py_INCREF(value);
    PyList_SetItem(list, (Py_ssize_t)place, value);
}

PyObject *event_field(const Following *following, Name name); /* owned; NULL: it has none, and no error is set */

/* Ids that are all less than `below`; false: others are among them. `object`, unless NULL, becomes what the book
   keeps of them; owned. */
bool ids_of(const Following *following, Name name, Ids *read, Py_ssize_t below, PyObject **object);
bool slots_of(const Following *following, PyObject **object);
bool blocks_of(const Following *following, PyObject **object);
bool read_ids(PyObject *kept, Ids *read, Py_ssize_t below);
bool read_more(PyObject *kept, Ids *read, Py_ssize_t below); /* behind those that were read before */

bool same(PyObject *entry, PyObject *usual);
bool all_are(PyObject *list, const Ids *ids, PyObject *usual);
void put_all(PyObject *list, const Ids *ids, PyObject *entry);

/* Whether all slots that the event touches can be read, and also have a pin, or a copy. */
bool all_are_readable(const Book *book);
bool all_are_pinned(const Book *book);
bool all_are_loading(const Book *book);

/* Add to the counts of a slot. One that has entry `from` has entry `to` then. Counts the idle ones. */
bool recount(Book *book, int64_t slot, SlotEntry from, SlotEntry to, int64_t copies, int64_t pins);

/* -------------------------------------------------------------------------------------------- book.c */

bool book_is_known(const Book *book); /* whether its attributes are of the types that this part knows */
Verdict follow(Following *following);
bool drop(PyObject *dict, PyObject *key);              /* take a key out, if it is there. false: an error is set */
void replace(PyObject **attribute, PyObject *value);   /* keep another object in an attribute of the book */
PyObject *keys_of(const Book *book);                   /* of the slots that the event touches, as a list; owned */
bool tell(Following *following, bool removed, PyObject *keys); /* to a router: no match from now on, or a match */
void following_clear(Following *following);

/* ------------------------------------------------------------------------------------------ booked.c */

Verdict submitted(Following *following);
Verdict reported(Following *following);

#endif
