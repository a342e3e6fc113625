"""Whatever a client or a peer can send: structure-aware, through the real codecs.

A short form is in `make test`; `python -m tests.fuzz --inputs 100000` is the nightly one.
"""
