"""Serve conversations with kvsm: `python -m engine LOG`."""

import random
import sys

from engine.engine import Engine, Request
from engine.model import BLOCK, GROUPS, VOCABULARY, Model

from kvsm import HostCopyEngine, HostPool, OffloadConfig, Offloader, Worker
from kvsm.core.scheduler import OffloadScheduler, SchedulerConfig

DEVICE_BLOCKS, HOST_BLOCKS = 60, 600

model = Model("weights 1", DEVICE_BLOCKS)
kv_cache = [*model.keys, *model.values]
block_bytes = sum(tensor[0].nbytes for tensor in kv_cache)
worker = Worker(0, HostCopyEngine(kv_cache, HostPool(HOST_BLOCKS, block_bytes)))
config = OffloadConfig(
    host_blocks=HOST_BLOCKS, device_blocks=DEVICE_BLOCKS, block_bytes=block_bytes, block_tokens=BLOCK
)
with Offloader.open(config, sys.argv[1], weights=model.version) as core:
    engine = Engine(model, DEVICE_BLOCKS, OffloadScheduler(core, SchedulerConfig(groups=GROUPS)), worker)
    chats = [[random.randrange(VOCABULARY) for _ in range(50)] for _ in range(12)]
    for turn in range(4):
        for number, chat in enumerate(chats):
            engine.add(request := Request(f"chat {number}, turn {turn}", list(chat), len(chat) + 10))
            chats[number] = request.tokens  # the next turn begins with this answer
        while engine.requests:
            engine.step()
    engine.close()
print(", ".join(f"{count} {what}" for what, count in engine.counts.items()))
