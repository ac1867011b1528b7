"""Your manager for vLLM's OffloadingConnector under test: `pytest examples/test_manager.py`."""

import pytest

pytest.importorskip("vllm", reason="a manager needs vLLM")

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # stands for yours

from kvsm.testing import ManagerMachine


class Manager(ManagerMachine):
    def make_manager(self, blocks):
        return CPUOffloadingManager(blocks, "arc", enable_events=True)


TestManager = Manager.TestCase
