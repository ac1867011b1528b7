/* Parts of a frozen state: a copy of the state at one moment, written while further events are folded.

   A part walks over its things (slots, device blocks, nodes of a queue) and writes them as they were at that moment.
   Before an event changes a thing, its old value is kept, unless the part has already written it (keeping.c). So the
   part writes the kept value of a thing if there is one, else the live value. */

#ifndef KVSM_FROZEN_H
#define KVSM_FROZEN_H

#include "body.h"

typedef enum { SLOTS, DEVICE_BLOCKS, OFFERS, ORDER } PartKind;
#define NUM_PARTS 4 /* of a frozen state. Its ORDER is the free queue's; queues of policies have parts of their own */

typedef enum {
    OPEN,
    WHOLE,
    DROPPED,
    BROKEN /* there was no memory to keep something */
} Status;

/* What a slot or a device block was. */
typedef struct {
    int32_t word;
    int64_t generation;       /* of a slot */
    PyObject *first, *second; /* of a slot: its key. Of a device block: what was brought, what is stale. Owned */
} Kept;

/* A number for each thing, 0 at first. Pages are allocated at their first use, so that making a table takes no time. */
#define TABLE_BITS 10
#define TABLE_PAGE (1 << TABLE_BITS)

typedef struct {
    uint32_t **pages;
    int32_t num_pages;
} Table;

bool table_make(Table *table, int64_t things);                /* false: an error is set */
bool table_put(Table *table, int64_t thing, uint32_t number); /* false: no memory */
void table_clear(Table *table);

static inline uint32_t table_at(const Table *table, int64_t thing)
{
    const uint32_t *page = table->pages[thing >> TABLE_BITS];
    return page == NULL ? 0 : page[thing & (TABLE_PAGE - 1)];
}

/* The streams of a part. */
enum {
    WORDS,
    GENERATIONS = 1,
    KEYS,        /* of a slot */
    BROUGHT = 1, /* of a device block */
    STALE,
    NUM_STREAMS
};

struct FrozenPart {
    PyObject_HEAD
    PartKind kind;
    Status status;
    int32_t size, next; /* number of things; the first thing that is not written */
    int32_t cost;       /* time to write one thing, in units of a slot. A slot of a queue's row takes one unit, too */
    bool is_written;    /* whether a piece is being written: its memory must not be freed meanwhile */
    Stream streams[NUM_STREAMS];

    /* Slots and device blocks. */
    Py_buffer word_buffer, generation_buffer; /* the live arrays */
    const int32_t *words;                     /* live, or `all_words` */
    int32_t *all_words;                       /* set once an event changes many words: all, as they were */
    const int64_t *generation;
    PyObject *key_of, *brought, *stale; /* owned */
    Kept **kept; /* in pages */
    uint32_t num_kept, num_pages;

    /* Offers: keys and their numbers, as pairs. Owned. */
    PyObject **pairs;

    /* A queue. */
    uint64_t *row;          /* a bit for each slot of the row that is not written */
    int32_t group, groups;  /* the groups before `group` have none */
    PyObject *links;        /* owns the live `next` */
    const int32_t *live;    /* the live `next` */
    int32_t node;           /* the next one of the list; 0: none is left */

    /* For each thing, its index in `kept` plus 1; for each node of a queue, its old `next` plus 1. 0: not kept. */
    Table table;
};

static inline Kept *kept_at(const FrozenPart *part, int64_t thing)
{
    const uint32_t place = table_at(&part->table, thing);
    return place == 0 ? NULL : &part->kept[(place - 1) >> TABLE_BITS][(place - 1) & (TABLE_PAGE - 1)];
}

void part_let_go(FrozenPart *part); /* release the live state */
void part_finish(FrozenPart *part); /* write the rest at once */

#endif
