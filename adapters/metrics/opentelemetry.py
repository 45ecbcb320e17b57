"""OpenTelemetry: histograms of snapshots and restores."""

from __future__ import annotations

from importlib.metadata import version

from opentelemetry import metrics

from datastates.adapters.metrics.figures import FIGURES, figures
from datastates.restoring.restored import Restored
from datastates.saving.snapshot import Snapshot

_BOUNDARIES = {
    unit: [mantissa * 10.0**exponent for exponent in range(*exponents) for mantissa in (1, 2, 5)]
    for unit, exponents in {"s": (-3, 4), "By": (6, 13), "By/s": (7, 12)}.items()
}
"""Upper ends of the histograms' buckets, by unit. A view of the application replaces them."""


class OpenTelemetryMetrics:
    """Records snapshots and restores in histograms of OpenTelemetry. Thread-safe.

    Give it to a checkpointer as ``on_commit``, and call it with what ``restore()`` returns. The names are
    ``datastates.snapshot.stall`` and so on. Provider, readers and exporters are the application's.
    """

    def __init__(self, provider: metrics.MeterProvider | None = None) -> None:
        """Make the histograms. ``provider``: the meter provider; None: the global one."""
        meter = metrics.get_meter("datastates", version("datastates"), provider)
        self._histograms = {
            figure: meter.create_histogram(
                f"datastates.{figure.of}.{figure.name}",
                figure.unit,
                figure.description,
                explicit_bucket_boundaries_advisory=_BOUNDARIES[figure.unit],
            )
            for figure in FIGURES
        }

    def __call__(self, done: Snapshot | Restored) -> None:
        """Record a committed snapshot, or a restore; raises as :func:`~datastates.adapters.metrics.figures.figures`."""
        for figure, value in figures(done).items():
            self._histograms[figure].record(value)
