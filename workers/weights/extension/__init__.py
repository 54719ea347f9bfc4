"""The code that runs inside vLLM's own processes; nothing of Roundhouse's can be imported there."""
