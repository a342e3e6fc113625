"""The routing policies there are: one line each, from which the command line's help is made.

What a policy is, and what it may look at, is in `proxy/policies`.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final = {
    "round_robin": "pdserve.proxy.policies.round_robin:round_robin",
    "least_loaded": "pdserve.proxy.policies.least_loaded:least_loaded",
}
"""By name, `module:function`."""
