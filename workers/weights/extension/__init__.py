"""The code that runs inside vLLM's own processes, where Roundhouse cannot be imported."""
