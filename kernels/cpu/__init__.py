"""C++ kernels for CPUs: their sources, the build of them at first use, and the calls into them."""
