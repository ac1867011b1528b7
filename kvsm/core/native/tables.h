/* Written by specs/native_tables.py from kvsm/states/ and kvsm/events.py. Do not edit. */

#define MACHINES_DIGEST "d04801b8cc0cef81"
#define KIND_NAMES "LogOpened RequestArrived RequestPreempted RequestFinished HitMatched HitReleased RequestDeferred KeysRecalled BlocksEvicted StorePlanned StoreSkipped LoadPlanned TransfersSubmitted TransferCancelled WorkerReported ReportRejected TransferLost BlocksTouched FlushRequested CacheReset StepEnded Ticked BlocksOffered OffersCounted BlocksRewritten Restarted RequestAdmitted HintAnswered TimesMeasured SlowHitFound"
#define NUM_MACHINES 4
#define MOST_ARCS 45
#define SMALL 16
#define RUNS 8
#define MOST_IN_RUNS 65536
#define STATE_MASK 15
#define FIRST_INDEXED 1
#define LAST_INDEXED 4
#define FIRST_READABLE 3
#define LAST_READABLE 4
#define IDLE 3
#define PINNED_ONCE 65539
#define EVICTED_WORD 5

enum {
    KIND_LogOpened,
    KIND_RequestArrived,
    KIND_RequestPreempted,
    KIND_RequestFinished,
    KIND_HitMatched,
    KIND_HitReleased,
    KIND_RequestDeferred,
    KIND_KeysRecalled,
    KIND_BlocksEvicted,
    KIND_StorePlanned,
    KIND_StoreSkipped,
    KIND_LoadPlanned,
    KIND_TransfersSubmitted,
    KIND_TransferCancelled,
    KIND_WorkerReported,
    KIND_ReportRejected,
    KIND_TransferLost,
    KIND_BlocksTouched,
    KIND_FlushRequested,
    KIND_CacheReset,
    KIND_StepEnded,
    KIND_Ticked,
    KIND_BlocksOffered,
    KIND_OffersCounted,
    KIND_BlocksRewritten,
    KIND_Restarted,
    KIND_RequestAdmitted,
    KIND_HintAnswered,
    KIND_TimesMeasured,
    KIND_SlowHitFound,
    NUM_KINDS
};

/* What each kind of event may change. A touch changes the eviction order alone. */
enum {
    NOTHING = 0,
    ITS_SLOTS = 1,
    ITS_BLOCKS = 2,
    ITS_TRANSFER = 4,
    ITS_TRANSFERS = 8,
    ITS_PINS = 16,
    EVERYTHING = 32
};
static const unsigned char changes[NUM_KINDS] __attribute__((unused)) = {
    [KIND_LogOpened] = NOTHING,
    [KIND_RequestArrived] = NOTHING,
    [KIND_RequestPreempted] = ITS_PINS,
    [KIND_RequestFinished] = ITS_PINS,
    [KIND_HitMatched] = ITS_SLOTS,
    [KIND_HitReleased] = ITS_PINS,
    [KIND_RequestDeferred] = NOTHING,
    [KIND_KeysRecalled] = NOTHING,
    [KIND_BlocksEvicted] = ITS_SLOTS,
    [KIND_StorePlanned] = ITS_SLOTS | ITS_BLOCKS,
    [KIND_StoreSkipped] = NOTHING,
    [KIND_LoadPlanned] = ITS_BLOCKS | ITS_PINS,
    [KIND_TransfersSubmitted] = ITS_TRANSFERS,
    [KIND_TransferCancelled] = ITS_TRANSFER,
    [KIND_WorkerReported] = ITS_TRANSFER,
    [KIND_ReportRejected] = NOTHING,
    [KIND_TransferLost] = ITS_TRANSFER,
    [KIND_BlocksTouched] = NOTHING,
    [KIND_FlushRequested] = NOTHING,
    [KIND_CacheReset] = EVERYTHING,
    [KIND_StepEnded] = NOTHING,
    [KIND_Ticked] = NOTHING,
    [KIND_BlocksOffered] = NOTHING,
    [KIND_OffersCounted] = NOTHING,
    [KIND_BlocksRewritten] = ITS_BLOCKS,
    [KIND_Restarted] = EVERYTHING,
    [KIND_RequestAdmitted] = NOTHING,
    [KIND_HintAnswered] = NOTHING,
    [KIND_TimesMeasured] = NOTHING,
    [KIND_SlowHitFound] = NOTHING,
};

#define SET_TO_ZERO INT32_MIN

/* A row of a table for one source: the ranges of the counters that it admits, and what is added to them. */
typedef struct {
    int32_t target, low[2], high[2], delta[2];
} Arc;

/* Which arcs may apply. */
typedef struct {
    int16_t first, count;
} Arcs;

typedef struct {
    int number, num_arcs, num_states, num_counters, shifts[2];
    int32_t limits[2];
    const Arc *arcs;
    const Arcs *dense; /* [trigger][state] */
} Machine;

#define BLOCK_FREE 0
#define BLOCK_ALLOCATED 1
#define BLOCK_STORING 2
#define BLOCK_STORED 3
#define BLOCK_LOADING 4
#define BLOCK_EVICTED 5
#define BLOCK_QUARANTINED 6
#define BLOCK_RETIRED 7
#define BLOCK_ALLOCATE 0
#define BLOCK_SUBMIT_STORE 1
#define BLOCK_CANCEL 2
#define BLOCK_PIN 3
#define BLOCK_UNPIN 4
#define BLOCK_BEGIN_LOAD 5
#define BLOCK_END_COPY_GOOD 6
#define BLOCK_END_COPY_BAD 7
#define BLOCK_EVICT 8
#define BLOCK_INVALIDATE 9
#define BLOCK_LOSE 10
#define BLOCK_TOUCH 11
#define BLOCK_RESTART 12

static const Arc block_arcs[] = {
    {1, {0, 0}, {4095, 32767}, {0, 0}},
    {1, {0, 0}, {4095, 32767}, {0, 0}},
    {2, {0, 0}, {4094, 32767}, {1, 0}},
    {5, {0, 0}, {4095, 32767}, {0, 0}},
    {3, {0, 0}, {4095, 32766}, {0, 1}},
    {4, {0, 0}, {4095, 32766}, {0, 1}},
    {3, {0, 1}, {4095, 32767}, {0, -1}},
    {4, {0, 1}, {4095, 32767}, {0, -1}},
    {4, {0, 1}, {4094, 32767}, {1, -1}},
    {4, {0, 1}, {4094, 32767}, {1, -1}},
    {3, {1, 0}, {1, 32767}, {-1, 0}},
    {4, {2, 0}, {4095, 32767}, {-1, 0}},
    {3, {1, 0}, {1, 32767}, {-1, 0}},
    {6, {2, 0}, {4095, 32767}, {-1, 0}},
    {5, {1, 0}, {1, 32767}, {-1, 0}},
    {7, {0, 0}, {4095, 32767}, {0, 0}},
    {5, {1, 0}, {1, 32767}, {-1, 0}},
    {4, {2, 0}, {4095, 32767}, {-1, 0}},
    {3, {1, 0}, {1, 32767}, {-1, 0}},
    {6, {2, 0}, {4095, 32767}, {-1, 0}},
    {5, {1, 0}, {1, 32767}, {-1, 0}},
    {7, {0, 0}, {4095, 32767}, {0, 0}},
    {5, {0, 0}, {4095, 0}, {0, 0}},
    {0, {0, 0}, {4095, 32767}, {0, 0}},
    {5, {0, 0}, {4095, 32767}, {0, SET_TO_ZERO}},
    {6, {0, 0}, {4095, 32767}, {0, SET_TO_ZERO}},
    {5, {0, 0}, {4095, 32767}, {0, SET_TO_ZERO}},
    {6, {0, 0}, {4095, 32767}, {0, SET_TO_ZERO}},
    {5, {0, 0}, {4095, 32767}, {0, 0}},
    {6, {0, 0}, {4095, 32767}, {0, 0}},
    {7, {0, 0}, {4095, 32767}, {0, 0}},
    {7, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {7, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {7, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {7, {0, 0}, {4095, 32767}, {0, 0}},
    {3, {0, 0}, {4095, 32767}, {0, 0}},
    {4, {0, 0}, {4095, 32767}, {0, 0}},
    {0, {0, 0}, {4095, 32767}, {0, 0}},
    {5, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {5, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {3, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {3, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {5, {0, 0}, {4095, 32767}, {0, 0}},
    {5, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
    {5, {0, 0}, {4095, 32767}, {SET_TO_ZERO, SET_TO_ZERO}},
};
static const Arcs block_dense[] = {
    {0, 1}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 1}, {2, 0}, {2, 0}, /* ALLOCATE */
    {2, 0}, {2, 1}, {3, 0}, {3, 0}, {3, 0}, {3, 0}, {3, 0}, {3, 0}, /* SUBMIT_STORE */
    {3, 0}, {3, 1}, {4, 0}, {4, 0}, {4, 0}, {4, 0}, {4, 0}, {4, 0}, /* CANCEL */
    {4, 0}, {4, 0}, {4, 0}, {4, 1}, {5, 1}, {6, 0}, {6, 0}, {6, 0}, /* PIN */
    {6, 0}, {6, 0}, {6, 0}, {6, 1}, {7, 1}, {8, 0}, {8, 0}, {8, 0}, /* UNPIN */
    {8, 0}, {8, 0}, {8, 0}, {8, 1}, {9, 1}, {10, 0}, {10, 0}, {10, 0}, /* BEGIN_LOAD */
    {10, 0}, {10, 0}, {10, 1}, {11, 0}, {11, 2}, {13, 0}, {13, 2}, {15, 1}, /* END_COPY_GOOD */
    {16, 0}, {16, 0}, {16, 1}, {17, 0}, {17, 2}, {19, 0}, {19, 2}, {21, 1}, /* END_COPY_BAD */
    {22, 0}, {22, 0}, {22, 0}, {22, 1}, {23, 0}, {23, 0}, {23, 0}, {23, 0}, /* EVICT */
    {23, 1}, {24, 1}, {25, 1}, {26, 1}, {27, 1}, {28, 1}, {29, 1}, {30, 1}, /* INVALIDATE */
    {31, 0}, {31, 0}, {31, 1}, {32, 0}, {32, 1}, {33, 0}, {33, 1}, {34, 1}, /* LOSE */
    {35, 0}, {35, 0}, {35, 0}, {35, 1}, {36, 1}, {37, 0}, {37, 0}, {37, 0}, /* TOUCH */
    {37, 1}, {38, 1}, {39, 1}, {40, 1}, {41, 1}, {42, 1}, {43, 1}, {44, 1}, /* RESTART */
};
static const Machine BLOCK = {0, 45, 8, 2, {4, 16}, {4095, 32767}, block_arcs, block_dense};

#define TRANSFER_PLANNED 0
#define TRANSFER_SUBMITTED 1
#define TRANSFER_COMPLETED 2
#define TRANSFER_FAILED 3
#define TRANSFER_CANCELLED 4
#define TRANSFER_ABANDONED 5
#define TRANSFER_DRAINED 6
#define TRANSFER_LOST 7
#define TRANSFER_SUBMIT 0
#define TRANSFER_CANCEL 1
#define TRANSFER_REPORT_GOOD 2
#define TRANSFER_REPORT_BAD 3
#define TRANSFER_ABANDON 4
#define TRANSFER_LOSE 5

static const Arc transfer_arcs[] = {
    {1, {0, 0}, {1023, 1023}, {0, 0}},
    {4, {0, 0}, {1023, 1023}, {0, 0}},
    {1, {2, 0}, {1023, 1023}, {-1, 0}},
    {2, {1, 0}, {1, 0}, {-1, 0}},
    {3, {1, 1}, {1, 1023}, {-1, 0}},
    {5, {2, 0}, {1023, 1023}, {-1, 0}},
    {6, {1, 0}, {1, 1023}, {-1, 0}},
    {1, {2, 0}, {1023, 1022}, {-1, 1}},
    {3, {1, 0}, {1, 1022}, {-1, 1}},
    {5, {2, 0}, {1023, 1023}, {-1, 0}},
    {6, {1, 0}, {1, 1023}, {-1, 0}},
    {5, {0, 0}, {1023, 1023}, {0, 0}},
    {5, {0, 0}, {1023, 1023}, {0, 0}},
    {7, {0, 0}, {1023, 1023}, {0, 0}},
    {7, {0, 0}, {1023, 1023}, {0, 0}},
};
static const Arcs transfer_dense[] = {
    {0, 1}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, /* SUBMIT */
    {1, 1}, {2, 0}, {2, 0}, {2, 0}, {2, 0}, {2, 0}, {2, 0}, {2, 0}, /* CANCEL */
    {2, 0}, {2, 3}, {5, 0}, {5, 0}, {5, 0}, {5, 2}, {7, 0}, {7, 0}, /* REPORT_GOOD */
    {7, 0}, {7, 2}, {9, 0}, {9, 0}, {9, 0}, {9, 2}, {11, 0}, {11, 0}, /* REPORT_BAD */
    {11, 0}, {11, 1}, {12, 0}, {12, 0}, {12, 0}, {12, 1}, {13, 0}, {13, 0}, /* ABANDON */
    {13, 0}, {13, 1}, {14, 0}, {14, 0}, {14, 0}, {14, 1}, {15, 0}, {15, 0}, /* LOSE */
};
static const Machine TRANSFER = {1, 15, 8, 2, {4, 14}, {1023, 1023}, transfer_arcs, transfer_dense};

#define LEASE_NONE 0
#define LEASE_READING 1
#define LEASE_WRITING 2
#define LEASE_RETIRED 3
#define LEASE_BEGIN_READ 0
#define LEASE_END_READ 1
#define LEASE_BEGIN_WRITE 2
#define LEASE_END_WRITE 3
#define LEASE_LOSE 4
#define LEASE_RESTART 5

static const Arc lease_arcs[] = {
    {1, {0}, {4094}, {1}},
    {1, {0}, {4094}, {1}},
    {1, {2}, {4095}, {-1}},
    {0, {1}, {1}, {-1}},
    {2, {0}, {4095}, {0}},
    {0, {0}, {4095}, {0}},
    {3, {0}, {4095}, {0}},
    {0, {0}, {4095}, {SET_TO_ZERO}},
    {0, {0}, {4095}, {SET_TO_ZERO}},
    {0, {0}, {4095}, {SET_TO_ZERO}},
    {0, {0}, {4095}, {SET_TO_ZERO}},
};
static const Arcs lease_dense[] = {
    {0, 1}, {1, 1}, {2, 0}, {2, 0}, /* BEGIN_READ */
    {2, 0}, {2, 2}, {4, 0}, {4, 0}, /* END_READ */
    {4, 1}, {5, 0}, {5, 0}, {5, 0}, /* BEGIN_WRITE */
    {5, 0}, {5, 0}, {5, 1}, {6, 0}, /* END_WRITE */
    {6, 0}, {6, 0}, {6, 1}, {7, 0}, /* LOSE */
    {7, 1}, {8, 1}, {9, 1}, {10, 1}, /* RESTART */
};
static const Machine LEASE = {2, 11, 4, 1, {4}, {4095}, lease_arcs, lease_dense};

#define REQUEST_NEW 0
#define REQUEST_RUNNING 1
#define REQUEST_MATCHED 2
#define REQUEST_DEFERRED 3
#define REQUEST_LOADING 4
#define REQUEST_PREEMPTED 5
#define REQUEST_FINISHED 6
#define REQUEST_RELEASED 7
#define REQUEST_MISS 0
#define REQUEST_HIT 1
#define REQUEST_UNMATCH 2
#define REQUEST_DEFER 3
#define REQUEST_WAKE 4
#define REQUEST_BEGIN_LOAD 5
#define REQUEST_END_LOAD 6
#define REQUEST_PREEMPT 7
#define REQUEST_FINISH 8
#define REQUEST_RESTART 9

static const Arc request_arcs[] = {
    {1, {0}, {1}, {0}},
    {1, {0}, {1}, {0}},
    {1, {0}, {1}, {0}},
    {2, {0}, {0}, {0}},
    {2, {0}, {0}, {0}},
    {2, {0}, {0}, {0}},
    {0, {0}, {1}, {0}},
    {3, {0}, {1}, {0}},
    {3, {0}, {1}, {0}},
    {3, {0}, {1}, {0}},
    {0, {0}, {1}, {0}},
    {4, {0}, {0}, {1}},
    {0, {1}, {1}, {-1}},
    {1, {1}, {1}, {-1}},
    {3, {1}, {1}, {-1}},
    {1, {1}, {1}, {-1}},
    {5, {1}, {1}, {-1}},
    {7, {1}, {1}, {-1}},
    {0, {0}, {1}, {0}},
    {5, {0}, {1}, {0}},
    {5, {0}, {1}, {0}},
    {5, {0}, {1}, {0}},
    {5, {0}, {1}, {0}},
    {5, {0}, {1}, {0}},
    {6, {1}, {1}, {0}},
    {7, {0}, {0}, {0}},
    {6, {1}, {1}, {0}},
    {7, {0}, {0}, {0}},
    {6, {1}, {1}, {0}},
    {7, {0}, {0}, {0}},
    {6, {1}, {1}, {0}},
    {7, {0}, {0}, {0}},
    {6, {1}, {1}, {0}},
    {7, {0}, {0}, {0}},
    {6, {1}, {1}, {0}},
    {7, {0}, {0}, {0}},
    {7, {0}, {1}, {SET_TO_ZERO}},
    {7, {0}, {1}, {SET_TO_ZERO}},
    {7, {0}, {1}, {SET_TO_ZERO}},
    {7, {0}, {1}, {SET_TO_ZERO}},
    {7, {0}, {1}, {SET_TO_ZERO}},
    {7, {0}, {1}, {SET_TO_ZERO}},
    {7, {0}, {1}, {SET_TO_ZERO}},
};
static const Arcs request_dense[] = {
    {0, 1}, {1, 1}, {2, 0}, {2, 0}, {2, 0}, {2, 1}, {3, 0}, {3, 0}, /* MISS */
    {3, 1}, {4, 1}, {5, 0}, {5, 0}, {5, 0}, {5, 1}, {6, 0}, {6, 0}, /* HIT */
    {6, 0}, {6, 0}, {6, 1}, {7, 0}, {7, 0}, {7, 0}, {7, 0}, {7, 0}, /* UNMATCH */
    {7, 1}, {8, 1}, {9, 0}, {9, 0}, {9, 0}, {9, 1}, {10, 0}, {10, 0}, /* DEFER */
    {10, 0}, {10, 0}, {10, 0}, {10, 1}, {11, 0}, {11, 0}, {11, 0}, {11, 0}, /* WAKE */
    {11, 0}, {11, 0}, {11, 1}, {12, 0}, {12, 0}, {12, 0}, {12, 0}, {12, 0}, /* BEGIN_LOAD */
    {12, 1}, {13, 1}, {14, 0}, {14, 1}, {15, 1}, {16, 1}, {17, 1}, {18, 0}, /* END_LOAD */
    {18, 1}, {19, 1}, {20, 1}, {21, 1}, {22, 1}, {23, 1}, {24, 0}, {24, 0}, /* PREEMPT */
    {24, 2}, {26, 2}, {28, 2}, {30, 2}, {32, 2}, {34, 2}, {36, 0}, {36, 0}, /* FINISH */
    {36, 1}, {37, 1}, {38, 1}, {39, 1}, {40, 1}, {41, 1}, {42, 1}, {43, 0}, /* RESTART */
};
static const Machine REQUEST = {3, 43, 8, 1, {4}, {1}, request_arcs, request_dense};
