"""The backend of CUDA devices: Triton kernels, compiled at first use."""
