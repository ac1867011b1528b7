/* The native part of a witness: what book.c and witness.c share.

   The second book (kvsm/replay/book.py) is one of lists, dicts and sets of Python. This part changes them as the
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

/* The attributes of a book. The numbers have the type that Python's T_LONGLONG has. */
typedef struct {
    PyObject_HEAD
    PyObject *slots, *leases, *keys, *held, *transfers, *matches, *spoiled, *brought, *older, *cursors, *may_go_back,
        *offers;
    long long free, idle, tick, chunk, workers, last_void, last_end, last_loss;
    Ids now_slots, now_blocks; /* what the event that was followed last touches */
} Book;

/* An event that a book follows. */
typedef struct {
    Book *book;
    PyObject *event, *seq_object;
    int64_t seq;
    int kind;
    PyObject *transfer; /* the number of the transfer that it changes; owned, or NULL */
    PyObject *brought;  /* the device blocks whose content it changes; owned, or NULL */
    PyObject *offers;   /* the offers whose cursors it changes; owned, or NULL */
    PyObject *name;     /* the request whose cursors it changes; owned, or NULL */
} Following;

/* The entries that most slots and device blocks have: kvsm.replay.book.USUAL. */
typedef enum { FREE_ENTRY, GONE, IDLE_ENTRY, PLANNED, FILLING, PINNED, READ, NUM_SLOT_ENTRIES } SlotEntry;
typedef enum { UNLEASED, READ_ONCE, WRITTEN, NUM_LEASE_ENTRIES } LeaseEntry;

/* What it has of Python. Never freed: it lives as long as the process. */
typedef struct {
    PyObject *slot_entries[NUM_SLOT_ENTRIES], *lease_entries[NUM_LEASE_ENTRIES];
    int32_t slot_words[NUM_SLOT_ENTRIES], lease_words[NUM_LEASE_ENTRIES]; /* the ledger's words that mean the same */
    PyObject *slot_reading, *lease_reading;                               /* word -> entry, for all words */
    PyObject *booked_transfer, *ledger;
} BookNames;

extern BookNames books;

bool book_is_known(const Book *book); /* whether its attributes are of the types that this part knows */
Verdict follow(Following *following);
bool read_ids(PyObject *ids, Ids *read, Py_ssize_t below); /* a tuple or list; false: it has others than `below` */
void following_clear(Following *following);

#endif
