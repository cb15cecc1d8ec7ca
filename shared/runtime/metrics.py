"""Prometheus metrics that are read from a service's state at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

S = TypeVar("S")
OTHER = "other"
"""Label value that stands for all values beyond a bound."""
Samples = float | Iterable[tuple[Sequence[str], float]]
"""
Samples of one metric: one value without labels, or (label values, value) for each label
combination.
"""


@dataclass(frozen=True, slots=True)
class Series(Generic[S]):
    """One metric family, and the function that reads its samples from a state."""

    name: str
    help: str
    read: Callable[[S], Samples]
    labels: tuple[str, ...] = ()
    family: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily

    def metric(self, state: S) -> Metric:
        """The metric family with its current samples."""
        samples = self.read(state)
        metric = self.family(self.name, self.help, labels=self.labels)
        for labels, value in [((), samples)] if isinstance(samples, int | float) else samples:
            metric.add_metric(labels, value)
        return metric


def gauge(name: str, help_text: str, read: Callable[[S], Samples], *labels: str) -> Series[S]:
    """Define a metric that can rise and fall."""
    return Series(name, help_text, read, labels)


def counter(name: str, help_text: str, read: Callable[[S], Samples], *labels: str) -> Series[S]:
    """
    Define a counter, which only rises; the counter is exported as *name* with the suffix `_total`.
    """
    return Series(name, help_text, read, labels, CounterMetricFamily)


class BoundedCounts:
    """
    Counts by labels, of which the first is a name that clients choose.

    Args:
        most: Maximum number of names with counts of their own; later names count as `OTHER`.
    """

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._names: set[str] = set()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, name: str, *labels: str, number: int = 1) -> None:
        """Add *number* to the count of (*name*, *labels*); 0 exports a count without an event."""
        if name not in self._names and len(self._names) < self._most:
            self._names.add(name)
        self._counts[name if name in self._names else OTHER, *labels] += number

    def samples(self) -> list[tuple[Sequence[str], float]]:
        """Samples for a `Series`: label values and count."""
        return [(labels, float(count)) for labels, count in self._counts.items()]


class StateCollector(Collector, Generic[S]):
    """
    Collects several metric families from one state.

    Args:
        registry: Registry in which the collector registers itself.
        state: Returns the state; called once at each scrape, on the event loop's thread.
        series: Metric families to collect.
        applies: Returns whether the families are exported now.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        state: Callable[[], S],
        series: Sequence[Series[S]],
        applies: Callable[[S], bool] = lambda _: True,
    ) -> None:
        self._state = state
        self.series = series
        self._applies = applies
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its current samples."""
        state = self._state()
        if self._applies(state):
            for each in self.series:
                yield each.metric(state)
