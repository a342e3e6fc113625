"""What needs a CUDA device: `make gpu`."""
