"""pdserve: serve large language models with prefill and decode on separate engines.

`connectors`, `kernels` and `proxy` are links to the folders of these names beside this one.
"""

__version__ = "0.1.0"
