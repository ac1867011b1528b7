/* The cache as a whole: blocks used in passing (kvsm/ledger/cache.py). A reset is left to Python. */

#include "body.h"

Verdict blocks_touched(Folding *folding)
{
    PyObject *ids = PyObject_GetAttr(folding->event, name_of(N_slots));
    const Words *blocks = &folding->fold->blocks;
    Batch slots;
    Verdict verdict = REFERENCE;
    if (may_reorder(folding, NULL) && batch_of(&slots, ids)) {
        const int32_t *new_words = next_words(folding, blocks, &BLOCK, BLOCK_TOUCH, &slots);
        if (new_words != NULL && are_distinct(folding, &slots, blocks->size))
            verdict = touch(folding, &slots, new_words);
        batch_clear(&slots);
    }
    Py_XDECREF(ids);
    return verdict;
}
