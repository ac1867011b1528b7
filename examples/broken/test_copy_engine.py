"""A copy engine that reports a transfer before its bytes are copied: it writes each copy late."""

from kvsm.copies import HostCopyEngine
from kvsm.testing import CopyEngineMachine


class ReportsEarly(HostCopyEngine):
    owed = None

    def copy_blocks(self, *copy):
        self.owed, owed = copy, self.owed
        if owed is not None:
            super().copy_blocks(*owed)


class CopyEngine(CopyEngineMachine):
    def make_engine(self, device, host):
        return ReportsEarly(device, host, threads=1)


TestCopyEngine = CopyEngine.TestCase
