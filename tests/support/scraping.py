"""/metrics as Prometheus reads it."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.support.canary import look


class Scrape(dict):
    """Values by name and labels: `scrape["noria_held", "requests"]`."""

    def __init__(self, text):
        look("metrics", text)
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        for family in self.families.values():
            for sample in family.samples:
                self[(sample.name, *sample.labels.values())] = sample.value

    def of_type(self, kind):
        """The values of all families of a type."""
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in self.families.values()
            if family.type == kind
            for sample in family.samples
        }


async def scrape(address, path="/metrics"):
    return await asyncio.to_thread(_get, f"http://{address}{path}")


def _get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return Scrape(response.read().decode())
