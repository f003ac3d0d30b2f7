"""Requirements of algorithms on the rest of a run: read by `tether.algorithms` and by the rules of the configuration.

It stands below both, because the configuration loads no torch.
"""

from collections.abc import Mapping

REQUIRED_AGGREGATION: Mapping[str, str] = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
}
"""Policy losses that are defined for one aggregation only."""
