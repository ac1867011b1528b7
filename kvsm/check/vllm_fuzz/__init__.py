"""Any connector of vLLM under vLLM's real schedulers, at random, on a CPU: what `kvsm vllm-fuzz` does.

Real: vLLM's `Scheduler` or `AsyncScheduler` with its block pool, KV cache manager and request queue, both
sides of the connector, and the code of its workers that orders copies by streams and events. Not real: the
model, which only writes and checks words (`word_model.py`), and the device, on which work runs when a seed
says so (`runtime.py`).

    shape.py       how large an engine is, and which connector it has
    connectors.py  the connectors that a shape names
    configs.py     vLLM's configurations and scheduler for it
    model.py       the words that each block must hold
    runtime.py     streams, events and copies as a worker of vLLM sees them, over a simulated device
    stand_ins.py   where vLLM's workers meet a device, and what they meet instead
    memory_tier.py a second tier for OffloadingConnector, in memory
    rank.py        a worker: the worker's side of the connector, and its device
    faults.py      what may go wrong in a worker, and who must survive it
    drawing.py     which action happens next in a run
    world.py       the engine as a world: what may happen, and what must hold

What is checked beside the words, the order of copies and the errors of calls:

    completions.py     each end of a transfer is told once
    stored_bytes.py    what kvsm has on the host, beside what was computed
    ending.py          what is asked at the end of a run: the three checks below, and the shutdown
    kv_event_check.py  published KV events, folded, beside what the device and the host have
    host_probe.py      what the host has, asked of any connector

    recorded.py        the events of a connector, as far as they are known, for a log beside a failure

`vllm_world.py` is the file to begin with. It needs vLLM; `shape.py` does not.
"""
