"""What a request is to keep: what it says itself, else what its model's are to, else all. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.config.objectives import ModelObjectives, objectives_by_model
from pdserve.proxy.brain.decision import MIN_TTFT_SLO_S, default_ttft_slo_s

if TYPE_CHECKING:
    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.brain.times import ServiceTimes

_NONE = ModelObjectives()


class ServiceObjectives:
    """See the module."""

    def __init__(self, config: ProxyConfig) -> None:
        self._ttft_s, self._itl_s = config.ttft_slo_s, config.itl_slo_s
        self._by_model = objectives_by_model(config.model_slo)

    def ttft_s(self, prompt: RoutePrompt, times: ServiceTimes | None) -> float:
        """Seconds to the first token.

        Args:
            times: What the default follows from; None: nothing is known.
        """
        model_s = self._by_model.get(prompt.model, _NONE).ttft_s
        slo_s = prompt.ttft_slo_s or model_s or self._ttft_s
        if not slo_s and times is not None:
            slo_s = default_ttft_slo_s(times, prompt.num_tokens)
        return slo_s or MIN_TTFT_SLO_S

    def itl_s(self, prompt: RoutePrompt) -> float:
        """Seconds between two tokens."""
        model_s = self._by_model.get(prompt.model, _NONE).itl_s
        return prompt.itl_slo_s or model_s or self._itl_s
