"""What proxies and engines say to one another over HTTP: registrations, and the engine hop."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from pdserve.config.http import ProxyConfig
from pdserve.errors import PdserveError
from pdserve.observe.clock import ManualClock
from pdserve.proxy.backends import Backends
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.metrics import Metrics
from pdserve.server.hop import known_tokens, parse_hop, tokens_to_send
from pdserve.wire.hop import Deregistration, KVTransferParams, PdserveParams, Registration
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.request import EngineInfo
from pdserve.wire.seal import PROTOCOL, UNREADABLE
from pdserve.wire.transfer import HANDOFFS, TICKETS, Endpoint
from tests.fuzz.core import Pair
from tests.fuzz.values import bent, like
from tests.toy_executor import toy_shape

_SECRET = "s3cret"


class RegistrationTarget:
    """A proxy's engines, as they register. See `Target`."""

    def __init__(self) -> None:
        self.num_refused = 0
        config, clock = ProxyConfig(), ManualClock()
        self._backends = Backends(config, clock, Breakers(config, clock, Metrics()))
        self._good = Registration(
            url="http://127.0.0.1:8100",
            role="prefill",
            engine=EngineInfo(
                engine_id=EngineId("p"),
                incarnation=Incarnation("1"),
                role="prefill",
                model="m",
                dtype="float32",
                max_model_len=48,
                block_size=8,
                num_blocks=16,
                max_num_seqs=4,
                endpoints=[Endpoint(host="127.0.0.1", port=1)],
                layout_digest="d",
                layout={"dtype": "float32"},
                can_push=True,
                kv_shape=toy_shape(16, 8),
                protocol=PROTOCOL,
            ),
            lease_s=9.0,
        )

    @property
    def num_held(self) -> int:
        """Engines."""
        return len(list(self._backends))

    def try_one(self, data: st.DataObject) -> None:
        """See `Target`."""
        said = [data.draw(like(self._good)) for _ in range(data.draw(st.integers(1, 2)))]
        bodies = [msgspec.json.encode(each) for each in said]
        if data.draw(st.booleans()):
            bodies.append(data.draw(bent(bodies[0])))
        for body in bodies:
            try:
                self._backends.register(msgspec.json.decode(body, type=Registration))
            except (*UNREADABLE, PdserveError):
                self.num_refused += 1
        backends = list(self._backends)
        for one in backends:
            for other in backends:
                self._backends.can_pair(one, other)
                self._backends.can_push(one, other)
        for backend in backends:
            leave = msgspec.json.encode({"url": backend.url})
            self._backends.deregister(msgspec.json.decode(leave, type=Deregistration).url)
        assert not self.num_held

    def check_service(self) -> None:
        """See `Target`."""
        self._backends.register(self._good)
        assert self.num_held == 1
        self._backends.deregister(self._good.url)

    def close(self) -> None:
        """See `Target`."""


class HopTarget:
    """An engine's server: `kv_transfer_params`, sealed or not. See `Target`."""

    num_held = 0

    def __init__(self) -> None:
        self.num_refused = 0
        self._pair = Pair()
        self._handoff, self._ticket = self._pair.handoff(), self._pair.ticket()

    def try_one(self, data: st.DataObject) -> None:
        """See `Target`."""
        secret = data.draw(st.sampled_from([_SECRET, "", "é"]))
        handoffs = [
            HANDOFFS.seal(data.draw(like(self._handoff)), secret)
            for _ in range(data.draw(st.integers(0, 2)))
        ]
        ticket = TICKETS.seal(data.draw(like(self._ticket)), secret)
        ours = PdserveParams(
            handoffs=[*handoffs, None],
            ticket=ticket if data.draw(st.booleans()) else None,
            prompt_tokens=tokens_to_send([[1, 2, 3]], "text"),
        )
        params = KVTransferParams(
            do_remote_decode=data.draw(st.booleans()),
            do_remote_prefill=data.draw(st.booleans()),
            pdserve=data.draw(like(ours)),
        )
        body = msgspec.json.encode(params)
        if data.draw(st.booleans()):
            body = data.draw(bent(body))
        try:
            read = msgspec.json.decode(body, type=KVTransferParams)
            known_tokens(read, "text", 1)
            parse_hop(read, num_choices=len(handoffs) + 1, secret=_SECRET)
        except (*UNREADABLE, PdserveError):
            self.num_refused += 1

    def check_service(self) -> None:
        """See `Target`."""
        good = PdserveParams(handoffs=[HANDOFFS.seal(self._handoff, _SECRET)])
        params = KVTransferParams(do_remote_prefill=True, pdserve=good)
        assert parse_hop(params, num_choices=1, secret=_SECRET) is not None

    def close(self) -> None:
        """See `Target`."""
