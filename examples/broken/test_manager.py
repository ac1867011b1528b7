"""A manager that does not give the blocks of a failed store back."""

import pytest

pytest.importorskip("vllm", reason="a manager needs vLLM")

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvsm.testing import ManagerMachine


class LeaksOnFailure(CPUOffloadingManager):
    def complete_store(self, keys, req_context, success=True):
        free = list(self._free_list)
        super().complete_store(keys, req_context, success)
        if not success:
            self._free_list[:] = free


class Manager(ManagerMachine):
    def make_manager(self, blocks):
        return LeaksOnFailure(blocks, enable_events=True)


TestManager = Manager.TestCase
