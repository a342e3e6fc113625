"""What the proxy knows of engines' KV and load, for policies that use it.

    PromptReader    a request's body -> the names of its prompt's grains (or of its bytes)
    EventFeed       engines' KV events -> PrefixIndex, exact while the stream is whole
    RoutedPrefixes  prompts sent to an engine whose events are unavailable -> the same index
    Prefixes        all of these, for routing

Built only for policies that look at prefixes: without one nothing here runs. Its answers are hints:
engines match prompts by their own hashes, so a wrong hint costs time and never text.
"""
