"""The endpoint picker: chooses engines for gateways that carry the requests themselves.

    gateway <-- gRPC, ext_proc v3 --> EppListener > GatewayExchange > Picker > Router
       |
       +--- the request, with PREFILL_HEADER ---> decode engine ---> prefill engine

The protocol is version 1.0.0 of the Gateway API inference extension's endpoint picker (its proposal
004), which runs inside Envoy's external processing.
"""
