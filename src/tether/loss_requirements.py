"""Requirements that algorithms place on the rest of a run, read by `tether.algorithms` and by the configuration rules.

It is a module below both, because the configuration does not load torch.
"""

from collections.abc import Mapping

REQUIRED_AGGREGATION: Mapping[str, str] = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
}
"""Policy losses that are only defined for one aggregation, with that aggregation."""
