"""Engine cores, where control plane and data plane meet, and their clients."""
