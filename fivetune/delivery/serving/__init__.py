"""A trained run behind HTTP: requests wait a few milliseconds for others and are answered together.

In: a TrainedRun and limits. Out: an ASGI application, and the server that runs it.
"""
