"""Your connector under test: `pytest examples/test_connector.py`."""

from kvsm.core.scheduler import OffloadScheduler
from kvsm.testing import OffloadMachine


class PatientConnector(OffloadScheduler):
    """Hands reports on one by one, like an engine that gets them from a queue."""

    def update_connector_output(self, reports):
        results = [super(PatientConnector, self).update_connector_output([one]) for one in reports]
        last = super().update_connector_output([])
        loads = sum((one.loads for one in results), ()) + last.loads
        sent = sum((one.finished_sending for one in results), ()) + last.finished_sending
        return type(last)(loads, sent, last.drained)


class Connector(OffloadMachine):
    def make_scheduler(self, offloader, config):
        return PatientConnector(offloader, config)


TestConnector = Connector.TestCase
