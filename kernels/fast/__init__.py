"""The backend of CUDA devices where speed is worth a row's last bits (``--numerics fast``)."""
