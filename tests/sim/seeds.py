"""Seeds that once ended in a violation, or in a request that nobody but its deadline ended.

Each is replayed by the tests. What a seed stands for depends on the scenario's draws: it is the
run that was found, for as long as `scenario.draw` stays as it is.
"""

FAILED_ONCE = {
    62: "a handoff of earlier times in place of the one that was made",
    242: "a registration that is said again after its lease is over",
    277: "pulls wait at D behind pushes that P has no blocks for, for seconds",
    544: "likewise, until their deadlines",
    2016: "a pushed request is preempted and admitted again",
    2043: "one of two ranks of D gives its reservation up while the other waits on",
    2046: "a pushed request is preempted and admitted again",
    2051: "one of two ranks of P withdraws a push while the other goes on",
    4009: "a request that only its deadline ended",
    4098: "a request that only its deadline ended",
}

FAILED_ONCE_WITH_STORE = {
    5080: "the second part of a load begins behind what the first part has brought and published",
    5139: "likewise",
}

LIKE_OTHERS = {544, 2043, 2046, 4098, 5080}
"""Left to the night: a cheaper seed of the same kind is in `make test`."""
