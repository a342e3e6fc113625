"""What a CUDA device can do, and how much of that the kernels and the step reach."""
