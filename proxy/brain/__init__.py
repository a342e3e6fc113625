"""What the proxy knows of engines' KV and load, for policies that use it.

    PromptReader    a request's body -> the names of its prompt's grains (or of its bytes)
    EventFeed       engines' KV events -> PrefixIndex, exact while the stream is whole
    RoutedPrefixes  what was sent to an engine whose events are not to be had -> the same index
    Prefixes        all of it, as routing asks

Made only for policies that look at prefixes: without one nothing here runs. What it says is a hint:
engines match prompts by hashes of their own, so that a wrong one costs time and never text.
"""
