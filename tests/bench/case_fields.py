"""What every record of a benchmark has."""

from __future__ import annotations

FIELDS = {
    *("op", "shape", "format", "isa", "tokens", "threads"),
    *("ms", "gbps", "tflops", "share_of_bandwidth", "share_of_peak"),
}
