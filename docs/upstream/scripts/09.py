"""TieringOffloadingManager: a request whose blocks are in a lower tier waits forever."""

import sys

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager


class Memory:
    """Replaces the memory that the workers share with the tiers."""

    def __init__(self, blocks):
        self.bytes = np.zeros((blocks, 16), np.uint8)

    def create_kv_memoryview(self):
        return memoryview(self.bytes)

    def cleanup(self):
        pass


def make_manager(blocks):
    primary = CPUPrimaryTierOffloadingManager(blocks, Memory(blocks))
    return TieringOffloadingManager(
        primary, [ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")]
    )


def new_request(manager, name, keys):
    context = ReqContext(name)
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (place + 1))
    manager.on_new_request(context)
    return context


def store(manager, keys, context):
    output = manager.prepare_store(keys, context)
    manager.complete_store(set(output.keys_to_store), context)
    for _ in range(2):  # the example tier copies at once
        manager.on_schedule_end(ScheduleEndContext((), ()))


def steps_until_answered(manager, keys, context):
    """Look the prompt up once a step, as OffloadingConnectorScheduler._maximal_prefix_lookup does."""
    for step in range(100):
        waits = False
        for key in keys:
            answer = manager.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            waits |= answer in (LookupResult.HIT_PENDING, LookupResult.RETRY)
        manager.on_schedule_end(ScheduleEndContext((), ()))
        if not waits:
            return step
    return None


def main():
    keys = [make_offload_key(b"a%d" % place, 0) for place in range(4)]
    failures = []

    # A prompt of 4 blocks, all in the tier, and a host of 3.
    manager = make_manager(3)
    storer = new_request(manager, "storer", keys)
    for key in keys:
        store(manager, [key], storer)
    if steps_until_answered(manager, keys, new_request(manager, "again", keys)) is None:
        failures.append("4 blocks in the tier, a host of 3: no answer in 100 steps")

    # A prompt of 3 blocks, and a host of 100 whose other 97 blocks are idle.
    manager = make_manager(100)
    resumed = new_request(manager, "resumed", keys[:3])
    store(manager, keys[:1], resumed)
    others = [make_offload_key(b"b%d" % place, 0) for place in range(100)]
    store(manager, others, new_request(manager, "other", others))
    store(manager, keys[1:3], resumed)
    if steps_until_answered(manager, keys[:3], resumed) is None:
        failures.append("3 blocks, a host of 100 idle ones: no answer in 100 steps")
    return "; ".join(failures) or None


if __name__ == "__main__":
    failure = main()
    print(f"FAILS: {failure}" if failure else "passes")
    sys.exit(bool(failure))
