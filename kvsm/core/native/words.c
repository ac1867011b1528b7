/* States as words: the steps of the tables (kvsm/states/words.py). */

#include "body.h"

/* Which arcs were taken since the last `forget`: read by kvsm.check.explore.coverage. */
unsigned char arcs_taken[NUM_MACHINES][MOST_ARCS];

int32_t machine_step(const Machine *machine, int trigger, int32_t word)
{
    const int state = state_of(word);
    if (state >= machine->num_states)
        return -1;
    const Arcs *arcs = &machine->dense[trigger * machine->num_states + state];
    for (int one = 0; one < arcs->count; one++) {
        const Arc *arc = &machine->arcs[arcs->first + one];
        int32_t after = arc->target;
        bool admitted = true;
        for (int counter = 0; counter < machine->num_counters; counter++) {
            const int32_t count = (word >> machine->shifts[counter]) & machine->limits[counter];
            if (count < arc->low[counter] || count > arc->high[counter]) {
                admitted = false;
                break;
            }
            if (arc->delta[counter] != SET_TO_ZERO)
                after |= (count + arc->delta[counter]) << machine->shifts[counter];
        }
        if (admitted) {
            arcs_taken[machine->number][arcs->first + one] = 1;
            return after;
        }
    }
    return -1;
}

int32_t begin_marks(Folding *folding, int32_t size)
{
    Fold *fold = folding->fold;
    if (fold->mark_size < size || fold->marked == INT32_MAX) {
        int32_t *mark = calloc((size_t)size, sizeof *mark);
        if (mark == NULL)
            return 0;
        free(fold->mark);
        fold->mark = mark;
        fold->mark_size = size;
        fold->marked = 0;
    }
    return ++fold->marked;
}

bool are_distinct(Folding *folding, const Batch *ids, int32_t size)
{
    if (ids->count <= SMALL) {
        for (Py_ssize_t one = 1; one < ids->count; one++)
            for (Py_ssize_t other = 0; other < one; other++)
                if (ids->ids[one] == ids->ids[other])
                    return false;
        return true;
    }
    Fold *fold = folding->fold;
    const int32_t now = begin_marks(folding, size);
    if (now == 0)
        return false;
    for (Py_ssize_t one = 0; one < ids->count; one++) {
        int32_t *seen = &fold->mark[ids->ids[one]];
        if (*seen == now)
            return false;
        *seen = now;
    }
    return true;
}

int32_t *next_words(Folding *folding, const Words *words, const Machine *machine, int trigger, const Batch *ids)
{
    Fold *fold = folding->fold;
    if (fold->scratch_size < ids->count || fold->scratch == NULL) {
        const Py_ssize_t size = ids->count < 64 ? 64 : ids->count;
        int32_t *scratch = malloc((size_t)size * sizeof *scratch);
        if (scratch == NULL)
            return NULL;
        free(fold->scratch);
        fold->scratch = scratch;
        fold->scratch_size = size;
    }
    int32_t before = -1, after = -1;
    for (Py_ssize_t one = 0; one < ids->count; one++) {
        const int64_t id = ids->ids[one];
        if (id < 0 || id >= words->size)
            return NULL;
        const int32_t word = words->words[id];
        if (word != before || one == 0) {
            before = word;
            after = machine_step(machine, trigger, word);
            if (after < 0)
                return NULL;
        }
        fold->scratch[one] = after;
    }
    return fold->scratch;
}

void count_words(const Words *words, int32_t word, int64_t more)
{
    const Machine *machine = words->machine;
    words->totals[state_of(word)] += more;
    for (int counter = 0; counter < machine->num_counters; counter++)
        if ((word >> machine->shifts[counter]) & machine->limits[counter])
            words->totals[STATE_MASK + 1 + counter] += more;
}

/* Usually all things of a batch have the same word, and get the same new word. */
void commit(const Words *words, const Batch *ids, const int32_t *new_words)
{
    int32_t before = 0, after = 0;
    int64_t alike = 0;
    for (Py_ssize_t one = 0; one < ids->count; one++) {
        int32_t *word = &words->words[ids->ids[one]];
        if (*word != before || new_words[one] != after) {
            count_words(words, before, -alike);
            count_words(words, after, alike);
            before = *word;
            after = new_words[one];
            alike = 0;
        }
        alike++;
        *word = after;
    }
    count_words(words, before, -alike);
    count_words(words, after, alike);
}
