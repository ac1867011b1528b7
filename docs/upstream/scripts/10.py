"""TieringOffloadingManager: after a reset, a KV event announces a block that does not exist."""

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


def main():
    primary = CPUPrimaryTierOffloadingManager(1, Memory(1), enable_events=True)
    tier = ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")
    manager = TieringOffloadingManager(primary, [tier])
    keys = [make_offload_key(b"a%d" % place, 0) for place in range(2)]
    on_host = set()  # what a subscriber of the KV events believes

    def read_events():
        for event in manager.take_events():
            if event.removed:
                on_host.difference_update(event.keys)
            else:
                on_host.update(event.keys)

    storer = ReqContext("storer")
    manager.on_new_request(storer)
    for key in keys:  # the host has room for the second key only; the tier has both
        manager.prepare_store([key], storer)
        manager.complete_store({key}, storer)
        for _ in range(2):
            manager.on_schedule_end(ScheduleEndContext((), ()))
    again = ReqContext("again")
    manager.on_new_request(again)
    assert manager.lookup(keys[0], again) is LookupResult.HIT_PENDING  # its promotion begins
    manager.on_schedule_end(ScheduleEndContext((), ()))
    read_events()

    manager.reset_cache()
    on_host.clear()  # AllBlocksCleared, which the GPU's block pool publishes before the connector is reset
    read_events()
    if on_host:
        assert primary.lookup(keys[0], again) is LookupResult.MISS
        return f"the host is empty, and the events say that it has {on_host}"
    return None


if __name__ == "__main__":
    failure = main()
    print(f"FAILS: {failure}" if failure else "passes")
    sys.exit(bool(failure))
