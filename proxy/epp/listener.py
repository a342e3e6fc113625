"""The gRPC server for gateways: external processing, and health.

Health has the services that the endpoint picker's protocol names: `liveness` reports this process,
`readiness` and the processor's own service report whether more requests are accepted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.config.http import TlsConfig
from pdserve.errors import ConfigError
from pdserve.http.tls import server_context
from pdserve.observe.log import log_event
from pdserve.proxy.epp.exchange import EppMetrics, GatewayExchange
from pdserve.proxy.epp.messages import event_of
from pdserve.proxy.epp.picking import Picker
from pdserve.proxy.epp.protobuf import WireFormatError, fields_of, varint_field

try:
    import grpc
    import grpc.aio
except ImportError as error:
    raise ConfigError(
        f"--epp-port needs grpcio, which is not installed ({error}): pip install 'pdserve[epp]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.proxy.epp.messages import ProcessingEvent
    from pdserve.proxy.services import Services

log = logging.getLogger(__name__)

PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH: Final = "grpc.health.v1.Health"
_CUT_S: Final = 0.1
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_receive_message_length", 4 << 20),
)


class ServingStatus(enum.Enum):
    """The serving statuses of `grpc.health.v1`."""

    SERVING = 1
    NOT_SERVING = 2


class EppListener:
    """Answers gateways. Create it inside a running event loop.

    Attributes:
        address: `host:port`, once the server has started.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._picker = Picker(services)
        self._metrics = EppMetrics(services.metrics.registry)
        self._server = grpc.aio.server(options=_OPTIONS)
        process = grpc.stream_stream_rpc_method_handler(self._process)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        self.address = ""

    async def start(self) -> None:
        """Accept connections.

        Raises:
            ConfigError: The address or a TLS file cannot be used.
        """
        config = self._services.config
        host = f"[{config.host}]" if ":" in config.host else config.host or "0.0.0.0"
        where = f"{host}:{config.epp.port}"
        try:
            if config.epp.certfile:
                port = self._server.add_secure_port(where, await self._credentials())
            else:
                port = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise ConfigError(f"--epp-port: cannot listen on {where}: {error}") from None
        await self._server.start()
        self.address = f"{host}:{port}"
        log_event(log, "gateways are answered", address=self.address)

    async def stop(self, cut: asyncio.Event, timeout_s: float) -> None:
        """Accept no more requests, and let those under way finish.

        Args:
            cut: Once set, ends them at once.
            timeout_s: How long they may take.
        """
        ending = asyncio.create_task(self._server.stop(timeout_s))
        cutting = asyncio.create_task(cut.wait())
        await asyncio.wait({ending, cutting}, return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()
        if not ending.done():
            await self._server.stop(_CUT_S)
        await ending

    async def _credentials(self) -> grpc.ServerCredentials:
        epp = self._services.config.epp
        try:  # gRPC would say that the address is in use
            tls = TlsConfig(certfile=epp.certfile, keyfile=epp.keyfile)
            await asyncio.to_thread(server_context, tls)
        except ConfigError as error:
            raise ConfigError(error.message.replace("--ssl-", "--epp-ssl-")) from None
        key, certificate = [
            await asyncio.to_thread(Path(name).read_bytes) for name in (epp.keyfile, epp.certfile)
        ]
        return grpc.ssl_server_credentials([(key, certificate)])

    async def _process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Serve `ExternalProcessor.Process`."""
        exchange = GatewayExchange(self._services, self._picker, self._metrics)
        limit_s = self._services.config.request_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                aclosing(exchange.replies(_events(requests))) as replies,
            ):
                async for reply in replies:
                    await context.write(reply)
        except WireFormatError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            late = f"it took more than {limit_s:g} s (--request-timeout-secs)"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, late)

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Serve `Health.Check`."""
        try:
            given = dict(fields_of(request)).get(1, b"")
        except WireFormatError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        match given:
            case b"" | b"liveness":
                status = ServingStatus.SERVING
            case b"readiness" | b"envoy.service.ext_proc.v3.ExternalProcessor":
                is_leaving = self._services.live.is_leaving
                status = ServingStatus.NOT_SERVING if is_leaving else ServingStatus.SERVING
            case _:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {given!r}")
        return varint_field(1, status.value)


async def _events(requests: AsyncIterator[bytes]) -> AsyncIterator[ProcessingEvent]:
    async for data in requests:
        yield event_of(data)
