/* `malloc` and its relatives for a native body that is compiled with -Dmalloc=counted_malloc and so on: counts what
   lives, and fails when it is told to. Not part of kvsm. */

#include <stdlib.h>

long allocations_until_failure; /* 1: the next one fails. 0: none does */
long allocations_that_live;

static void *counted(void *memory)
{
    allocations_that_live += memory != NULL;
    return memory;
}

static int fails(void) { return allocations_until_failure > 0 && --allocations_until_failure == 0; }

void *counted_malloc(size_t size) { return fails() ? NULL : counted(malloc(size)); }

void *counted_calloc(size_t count, size_t size) { return fails() ? NULL : counted(calloc(count, size)); }

void *counted_realloc(void *memory, size_t size)
{
    if (fails())
        return NULL;
    return memory == NULL ? counted(malloc(size)) : realloc(memory, size);
}

void counted_free(void *memory)
{
    allocations_that_live -= memory != NULL;
    free(memory);
}
