"""Run any connector of vLLM under vLLM's real schedulers, at random, on a CPU: the world of `kvsm vllm-fuzz`.

Real are vLLM's `Scheduler` or `AsyncScheduler` with its block pool, KV cache manager and request queue, both
sides of the connector, and the code of its workers that orders copies by streams and events. Simulated are
the model, which only writes and checks words (`word_model.py`), and the device, whose steps run in a random
order (`runtime.py`).

    shape.py        the size of an engine, and its connector
    connectors.py   the connectors that a shape names
    configs.py      vLLM's configurations and its scheduler for a shape
    word_model.py   the words that each block must hold
    runtime.py      streams, events and copies as a vLLM worker uses them, on a simulated device
    stand_ins.py    the places where vLLM's workers use a device, and their replacements
    memory_tier.py  a second tier for OffloadingConnector, in memory
    rank.py         a worker: the worker side of the connector, and its device
    faults.py       faults of a worker, and the connectors that must survive them
    lost_copies.py  copies that an engine may give up, and the clock for their deadlines
    drawing.py      the choice of the next action
    vllm_world.py   the engine as a world: its actions and checks

Besides the words, the order of copies and the errors of calls these are checked:

    completions.py     each end of a transfer is reported once
    longest_hits.py    each match of kvsm's connector is the longest one
    twin_asks.py       each match of another connector is as long as that of a new request, and the longest
    stored_bytes.py    kvsm's host pool holds the computed words
    ending.py          the end of a run: the checks below, lost host blocks, and the shutdown
    kv_event_check.py  published KV events, folded, equal the content of device and host
    host_probe.py      the content of the host, found by requests to any connector
    served_prompts.py  what a connector has at rest is served to the prompts of the run
    known_blocks.py    the blocks that a connector has by its answers, and what it can serve with them

`recorded.py` collects the events of a connector, if it is known how, for the log of a failure.

`vllm_world.py` is the file to begin with. It needs vLLM; `shape.py` does not.
"""
