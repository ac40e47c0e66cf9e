"""Stands in for vLLM where there is no GPU: an engine that starts, says on what, and answers no
request.

In: what `rft.rollout.engine` gives vLLM, and the environment of its actor. Out: one line of JSON
per engine in the file of STARTS, which the test reads. Names and arguments are those of vLLM 0.32.
"""

__version__ = "0.32.0"
