"""How vLLM's flags, environment variables, KV connectors and commands map to pdserve's.

`flags`, `variables`, `connectors` and `commands` are the data, read from the source of vLLM's
release `RELEASE`. `answers` looks a name up in them; `translate` makes settings of what can be
taken.
"""

from typing import Final

RELEASE: Final = "0.32"
