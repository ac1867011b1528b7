"""Your copy engine under test: `pytest examples/test_copy_engine.py`."""

from kvsm.copies import HostCopyEngine  # stands for yours
from kvsm.testing import CopyEngineMachine


class CopyEngine(CopyEngineMachine):
    def make_engine(self, device, host):
        return HostCopyEngine(device, host, threads=3)


TestCopyEngine = CopyEngine.TestCase
