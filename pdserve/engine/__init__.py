"""Where the control plane and the data plane touch: the engine core and its client."""
