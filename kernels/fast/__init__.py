"""The CUDA backend of ``--numerics fast``, which trades a row's last bits for speed."""
