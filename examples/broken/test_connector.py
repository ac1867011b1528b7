"""A connector that takes several reports at once, and forgets all but the first."""

from kvsm.core.scheduler import OffloadScheduler
from kvsm.testing import OffloadMachine


class ForgetsReports(OffloadScheduler):
    def update_connector_output(self, reports):
        return super().update_connector_output(list(reports)[:1])


class Connector(OffloadMachine):
    def make_scheduler(self, offloader, config):
        return ForgetsReports(offloader, config)


TestConnector = Connector.TestCase
